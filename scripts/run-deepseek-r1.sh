#!/usr/bin/env bash
# GRPO on DeepSeek-R1, 24 nodes of 8 H200 141 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/deepseek-r1 PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-deepseek-r1.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model deepseek-r1 "$@"
