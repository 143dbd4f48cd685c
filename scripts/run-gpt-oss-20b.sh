#!/usr/bin/env bash
# GRPO on gpt-oss-20b, 2 nodes of 8 H100 80 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/gpt-oss-20b PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-gpt-oss-20b.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model gpt-oss-20b "$@"
