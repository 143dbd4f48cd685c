#!/usr/bin/env bash
# The main job on real engines, from a fresh machine with Python 3.11: installs mslime into .venv, makes a small
# Qwen3-MoE and a task, warms the model up with supervised training, and lifts its held-out accuracy with reinforcement
# learning: Megatron ranks over gloo train, an SGLang server generates, Ray supervises. With --gpu one GPU does both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/common.sh

usage() {
  cat <<'TEXT'
usage: bash scripts/quickstart.sh [options]
  --pp          two pipeline stages (PP2) instead of tensor and expert parallelism (TP2 EP2)
  --gpu         one GPU, shared by trainer and engine, which takes weights by CUDA handles; every bit is compared after
                every sync
  --seed N      seed of model, data and sampling (default 1234)
  --restart     delete the last quickstart; without it an interrupted one continues
  --out DIR     output directory (default outputs/quickstart)
  --venv DIR    virtual environment (default .venv)
  -- FLAGS      settings for the reinforcement-learning run, for example -- --rollout.max-staleness 0
TEXT
}

OUT=outputs/quickstart VENV="${MSLIME_VENV:-.venv}" SEED=1234 RESTART=0 PP=0 MODE=cpu TASK=() SHARED=()
LAYOUT=(--megatron.tensor-model-parallel-size 2 --megatron.expert-model-parallel-size 2)
while [ $# -gt 0 ]; do
  case "$1" in
    --pp) PP=1
          LAYOUT=(--megatron.pipeline-model-parallel-size 2 --megatron.tensor-model-parallel-size 1
                  --megatron.expert-model-parallel-size 1) ;;
    --gpu) MODE=gpu TASK=(--head-dim 64)  # SGLang has no rotary kernel for the usual 32
           LAYOUT=(--cluster.device cuda --cluster.trainer-ranks 1 --megatron.tensor-model-parallel-size 1
                   --megatron.expert-model-parallel-size 1)
           SHARED=(--cluster.placement colocated --weights.transport handles --weights.verify always
                   --rollout.max-staleness 0) ;;
    --seed) SEED="${2:?--seed needs a number}"; shift ;;
    --restart) RESTART=1 ;;
    --out) OUT="${2:?--out needs a directory}"; shift ;;
    --venv) VENV="${2:?--venv needs a directory}"; shift ;;
    --) shift; break ;;
    -h|--help) usage; exit 0 ;;
    *) echo "quickstart: unknown option $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ "$MODE$PP" != gpu1 ] || fail "--pp needs two ranks, and --gpu has one" "use one of the two"
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
# Check before the installation: a shared checkout is often read-only.
{ mkdir -p "$OUT" && [ -w "$OUT" ]; } 2>/dev/null || fail "$OUT cannot be written" "choose a writable directory with --out DIR"

say "1/4  Install (three to eight minutes the first time)"
bash scripts/install.sh "--$MODE" --venv "$VENV"
export PATH="$(cd "$VENV" && pwd)/bin:$PATH"

if [ "$RESTART" = 1 ]; then
  rm -rf "$OUT"
elif [ -f "$OUT/seed" ] && [ "$(cat "$OUT/seed")" != "$SEED" ]; then
  echo "quickstart: $OUT was made with --seed $(cat "$OUT/seed"); use --restart to replace it, or another --out" >&2
  exit 2
fi
mkdir -p "$OUT"  # again, after --restart
echo "$SEED" > "$OUT/seed"

say "2/4  Make a small Qwen3-MoE checkpoint and a task"
[ -f "$OUT/task/heldout.jsonl" ] || python -m examples.quickstart.make_task --out "$OUT/task" --seed "$SEED" ${TASK[@]+"${TASK[@]}"}

say "3/4  Supervised warm start (Megatron, ${LAYOUT[*]})"
if [ -f "$OUT/sft/hf/config.json" ]; then
  echo "already done: $OUT/sft/hf"
else
  mslime train examples/quickstart/sft.yaml --output-dir "$OUT" --seed "$SEED" --model.path "$OUT/task/model" \
    --data.prompts "$OUT/task/sft.jsonl" "${LAYOUT[@]}"
fi

say "4/4  Reinforcement learning (Megatron + SGLang + Ray)"
mslime train examples/quickstart/run.yaml --output-dir "$OUT" --seed "$SEED" --model.path "$OUT/sft/hf" \
  --data.prompts "$OUT/task/train.jsonl" "${LAYOUT[@]}" ${SHARED[@]+"${SHARED[@]}"} \
  --data.eval-sets "[{name: held_out, path: $OUT/task/heldout.jsonl}, {name: sampled, path: '$OUT/task/heldout.jsonl@[:64]', samples_per_prompt: 8, temperature: 1.0}]" \
  "$@"
mslime report "$OUT/rl"
python examples/quickstart/summary.py "$OUT"
