#!/usr/bin/env bash
# GRPO on Mixtral-8x7B, 3 nodes of 8 H100 80 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/mixtral-8x7B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-mixtral-8x7B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model mixtral-8x7B "$@"
