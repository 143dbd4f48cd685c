#!/usr/bin/env bash
# GRPO on OLMoE-1B-7B, one node of 8 H100 80 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/olmoe-1B-7B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-olmoe-1B-7B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model olmoe-1B-7B \
  --rollout.max-response-tokens 3072 \
  --data.max-prompt-tokens 512 "$@"
