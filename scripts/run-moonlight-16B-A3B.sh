#!/usr/bin/env bash
# GRPO on Moonlight-16B-A3B, 2 nodes of 8 H100 80 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/moonlight-16B-A3B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-moonlight-16B-A3B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model moonlight-16B-A3B \
  --rollout.max-response-tokens 6144 \
  --data.max-prompt-tokens 1024 "$@"
