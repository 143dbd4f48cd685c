#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B, one node of 8 H100/H200. Checks the run, then starts it; further flags win over these.
#   MODEL=/models/Qwen3-30B-A3B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-qwen3-30B-A3B.sh [--flag value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${MODEL:?set MODEL to the Hugging Face checkpoint directory}"
: "${PROMPTS:?set PROMPTS to a .jsonl or .parquet file with prompt and label}"
source scripts/models/qwen3-30B-A3B.sh

RUN_ARGS=(
  --name "${NAME:-qwen3-30B-A3B}"
  --model.path "$MODEL"
  --data.prompts "$PROMPTS"
  --data.apply-chat-template
  --reward.kind math
  --rollout.groups-per-step 32
  --rollout.group-size 8
  --rollout.max-staleness 1
  --rollout.over-sampling 1.5
  --rollout.dynamic-filter zero_variance
  --rollout.max-response-tokens 8192
  --train.lr 1e-6
  --train.num-steps 500
  --checkpoint.save-every 50
)
if [ -n "${HELD_OUT:-}" ]; then
  RUN_ARGS+=(--data.eval-sets "[{name: held_out, path: $HELD_OUT}]")
fi
if [ "${CHECK_ONLY:-0}" != 1 ]; then
  mslime check "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
  exec mslime train "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
fi
exec mslime check "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
