#!/usr/bin/env bash
# GRPO on Qwen2.5-0.5B, two GPUs of one machine. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/qwen2.5-0.5B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-qwen2.5-0.5B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model qwen2.5-0.5B \
  --rollout.max-response-tokens 2048 "$@"
