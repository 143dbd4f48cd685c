#!/usr/bin/env bash
# GRPO on DeepSeek-V3, 16 nodes of 8 H100 80 GB that trainer and engines share. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/deepseek-v3 PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-deepseek-v3-128gpus.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model deepseek-v3-128gpus "$@"
