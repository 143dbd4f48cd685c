# Shared code of scripts/run-*.sh: source this, then call run_model MODEL [--flag value ...].
#
# Environment: MODEL (checkpoint directory) and PROMPTS (.jsonl or .parquet with prompt and label) are required;
# HELD_OUT is an evaluation file, ENGINE_URLS the addresses of servers that you started yourself, NAME names the run.
# RAY_ADDRESS (HOST:6379) names the Ray cluster that a model on several machines needs: docs/clusters.md.
# RESTARTS is how often in a row a failed run is restarted (3; scripts/train_again.sh).
# CHECK_ONLY=1 stops after `mslime check`, PLAN_ONLY=1 after `mslime plan`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/lib/common.sh

# find_mslime: puts `mslime` on PATH, from the checkout's own environment when none is active.
find_mslime() {
  if command -v mslime >/dev/null; then return; fi
  [ -x .venv/bin/mslime ] || fail "the command mslime was not found, neither on PATH nor in $PWD/.venv" \
    "bash scripts/install.sh, then source .venv/bin/activate"
  export PATH="$PWD/.venv/bin:$PATH"
}

# run_model MODEL FLAGS...: checks the run, plans it (a run that does not fit is not begun) and starts it. The layout comes
# from scripts/models/MODEL.sh; of flags given twice the later one wins, so those of the command line come last.
run_model() {
  local model="$1"
  shift
  [ -n "${MODEL:-}" ] || fail "MODEL is not set" "MODEL=/path/to/checkpoint PROMPTS=/path/to/prompts.jsonl bash scripts/run-$model.sh"
  [ -n "${PROMPTS:-}" ] || fail "PROMPTS is not set" "set PROMPTS to a .jsonl or .parquet file with prompt and label"
  find_mslime
  source "scripts/models/$model.sh"
  local settings=(
    --name "${NAME:-$model}"
    --model.path "$MODEL"
    --data.prompts "$PROMPTS"
    --data.apply-chat-template
    --data.max-prompt-tokens 1024
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
    "${MODEL_ARGS[@]}"
  )
  if [ -n "${HELD_OUT:-}" ]; then settings+=(--data.eval-sets "[{name: held_out, path: $HELD_OUT}]"); fi
  if [ -n "${ENGINE_URLS:-}" ]; then
    local urls
    read -ra urls <<<"$ENGINE_URLS"
    settings+=(--sglang.urls "${urls[@]}")
  fi
  if [ "${PLAN_ONLY:-0}" != 1 ]; then mslime check "${settings[@]}" "$@"; fi
  if [ "${CHECK_ONLY:-0}" = 1 ]; then return; fi
  mslime plan "${settings[@]}" "$@" || [ $? = 3 ]  # 3: it fits, tightly
  if [ "${PLAN_ONLY:-0}" = 1 ]; then return; fi
  local directory
  directory="$(mslime check --run-dir "${settings[@]}" "$@")"
  exec bash scripts/train_again.sh "$directory" mslime train "${settings[@]}" "$@"
}
