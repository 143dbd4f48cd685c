#!/usr/bin/env bash
# What one GPU can show, in at most 18 minutes: checks, tests, the quickstart, benchmarks, and one table.
set -euo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/common.sh

usage() {
  cat <<'TEXT'
Usage: bash scripts/on_gpu.sh [--venv DIR] [--out DIR] [--seconds N] [--only STEP]... [--sglang NAME=VALUE]...
                              [--fresh] [--device cpu] [--help]

Runs these steps on one H100 or H200, each with its own time limit, and rewrites OUT/table.md and OUT/figures.jsonl
after each. The same command continues where the last one was cut off: steps that succeeded, and GPU tests that passed,
are not repeated.

    doctor          60 s  the machine, kernels against plain torch, its speed
    tests          180 s  tests/gpu: families, FP8, adapters, sleep, weights to engines by every transport of one GPU
    quickstart     240 s  scripts/quickstart.sh --gpu: trainer and engine share the GPU, every bit compared
    quickstart_off 120 s  eight steps of it without routing replay
    run            240 s  benchmarks/on_gpu_run.py: engine, mismatch and sync at the widths of Qwen3-30B-A3B
    step           180 s  benchmarks/on_gpu.py: training step, FP8, packing, sleep; a profile in OUT/step.json.gz
    kernels         60 s  benchmarks/log_probs.py at the size of a real step

  --venv DIR     environment of scripts/install.sh --gpu (default .venv)
  --out DIR      results and logs (default outputs/on-gpu)
  --seconds N    end after N seconds at most; a step that would begin with less than 20 s left is not begun
  --only STEP    this step; may be given several times (default: all)
  --sglang NAME=VALUE
                 a field of SGLang's servers, such as attention_backend=triton; may be given several times
  --fresh        discard results of earlier calls
  --device cpu   tiny sizes on CPUs, to test this script

Exit status 1 if a step failed, was cut off or was not begun.
TEXT
}

venv="$PWD/.venv" out="$PWD/outputs/on-gpu" seconds="" only=() sglang=() fresh="" device=cuda
steps=(doctor tests quickstart quickstart_off run step kernels)
while [ $# -gt 0 ]; do
  case "$1" in
    --venv | --out | --seconds | --only | --sglang | --device)
      [ $# -ge 2 ] || fail "$1 needs a value" "see bash scripts/on_gpu.sh --help"
      case "$1" in
        --venv) venv="$(absolute "$2")" ;;
        --out) out="$(absolute "$2")" ;;
        --seconds) seconds="$2" ;;
        --only) only+=("$2") ;;
        --sglang) sglang+=("$2") ;;
        --device) device="$2" ;;
      esac
      shift
      ;;
    --fresh) fresh=1 ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "unknown option $1" "see bash scripts/on_gpu.sh --help" ;;
  esac
  shift
done
[[ "${seconds:-1}" =~ ^[1-9][0-9]*$ ]] || fail "--seconds is $seconds: must be a whole number above 0" "use for example --seconds 600"
case "$device" in cpu | cuda) ;; *) fail "--device is $device" "use cuda or cpu" ;; esac
for step in ${only[@]+"${only[@]}"}; do
  [[ " ${steps[*]} " == *" $step "* ]] || fail "--only $step: no such step" "use one of: ${steps[*]}"
done
for field in ${sglang[@]+"${sglang[@]}"}; do
  [[ "$field" == [a-z]*=* ]] || fail "--sglang $field: not NAME=VALUE" "use for example --sglang attention_backend=triton"
done
[ -x "$venv/bin/python" ] || fail "no environment in $venv" "run bash scripts/install.sh --gpu --venv $venv, or set --venv DIR"
if [ "$device" = cuda ]; then
  command -v nvidia-smi >/dev/null 2>&1 || fail "no NVIDIA driver was found" "use a machine with a GPU; --device cpu tests this script"
fi
begin="$(date +%s)"
export PATH="$venv/bin:$PATH" MSLIME_VENV="$venv" PYTHONUNBUFFERED=1

# Results of other code are not continued.
state="$device ${sglang[*]-} $(find mslime mslime_plugins benchmarks examples tests/gpu scripts pyproject.toml -type f \
  -not -name '*.pyc' | LC_ALL=C sort | xargs cat | cksum)"
[ -z "$fresh" ] || rm -rf "$out"
mkdir -p "$out"
if [ -f "$out/state" ] && [ "$(cat "$out/state")" != "$state" ]; then
  fail "$out has results of other code, or of other options" "discard them with --fresh, or choose another --out DIR"
fi
printf '%s' "$state" >"$out/state"
[ -f "$out/commit" ] || git rev-parse --short HEAD >"$out/commit" 2>/dev/null || echo unknown >"$out/commit"

# run_step NAME LIMIT COMMAND...: output to NAME.log; exit status and seconds to NAME.status.
failed=0
run_step() {
  local name="$1" limit="$2" left started status=0
  shift 2
  [ ${#only[@]} = 0 ] || [[ " ${only[*]} " == *" $name "* ]] || return 0
  if [ -f "$out/$name.status" ] && [[ "$(cat "$out/$name.status")" == "0 "* ]]; then
    say "$name: succeeded before"
    return 0
  fi
  started="$(date +%s)"
  if [ -n "$seconds" ]; then
    left=$((begin + seconds - started))
    if [ "$left" -lt 20 ]; then
      say "$name: not begun, no time is left"
      failed=1
      return 0
    fi
    [ "$limit" -le "$left" ] || limit="$left"
  fi
  say "$name: at most $limit s"
  timeout --signal=INT --kill-after=20 "$limit" "$@" >>"$out/$name.log" 2>&1 || status=$?
  [ "$status" != 137 ] || status=124
  printf '%s %s\n' "$status" "$(($(date +%s) - started))" >"$out/$name.status"
  [ "$status" = 0 ] || failed=1
  python scripts/lib/on_gpu_table.py "$out"
  say "$name: $(sed -n "s/^| $name | //p" "$out/table.md" | sed 's/ |.*//')"
}

# Passed tests are left out the next time.
gpu_tests() {
  sed -n 's/^.*PASSED \(tests.gpu.*\)$/--deselect=\1/p' "$out/tests.log" >"$out/passed"
  python -m pytest tests/gpu/test_weights_on_gpu.py tests/gpu/test_trainer_on_gpu.py -W ignore -v -n "$workers" "@$out/passed" ||
    [ $? = 5 ]  # all have passed before
}

shared=(--cluster.placement colocated --weights.transport handles --weights.verify always --rollout.max-staleness 0)
fields=() quick=(--out "$out/quickstart" --venv "$venv") few=() tiny=() short=()
for field in ${sglang[@]+"${sglang[@]}"}; do fields+=("--sglang.${field%%=*}" "${field#*=}"); done
off=("$venv/bin/mslime" train examples/quickstart/run.yaml --output-dir "$out/quickstart" --seed 1234 --name rl_off
  --model.path "$out/quickstart/sft/hf" --data.prompts "$out/quickstart/task/train.jsonl" --data.eval-sets '[]'
  --observe.eval-every 0 --train.num-steps 8 --train.replay off "${shared[@]}" --cluster.device "$device" --cluster.trainer-ranks 1
  --megatron.tensor-model-parallel-size 1 --megatron.expert-model-parallel-size 1)
workers="$(($(nproc) > 13 ? 12 : ($(nproc) + 1) / 2))"
if [ "$device" = cuda ]; then
  quick+=(--gpu)
else
  few=("${shared[@]}" --train.num-steps 4)
  tiny=(--device cpu --small --layers 1)
  short=(--steps 3 --requests 8 --tokens 16)
fi
export out workers
export -f gpu_tests
if [ "$device" = cuda ]; then
  python -W ignore scripts/lib/on_gpu_precompile.py 64 128 >"$out/precompile.log" 2>&1 &
fi
run_step doctor 60 mslime doctor --skip step collectives disk
run_step tests 180 bash -c gpu_tests
run_step quickstart 240 bash scripts/quickstart.sh "${quick[@]}" -- ${few[@]+"${few[@]}"} ${fields[@]+"${fields[@]}"}
run_step quickstart_off 120 "${off[@]}" ${fields[@]+"${fields[@]}"}
run_step run 240 python benchmarks/on_gpu_run.py ${tiny[@]+"${tiny[@]}"} ${short[@]+"${short[@]}"} --sglang ${sglang[@]+"${sglang[@]}"}
if [ "$device" = cuda ]; then
  run_step step 180 python benchmarks/on_gpu.py --fp8 blockwise tensorwise --trace "$out/step.json.gz"
  run_step kernels 60 python benchmarks/log_probs.py --rows 8192 --vocab 151936 --json "$out/kernels.json"
else
  run_step step 180 python benchmarks/on_gpu.py "${tiny[@]}" --tokens 256 --steps 1 --fp8 --trace "$out/step.json.gz"
  run_step kernels 60 python benchmarks/log_probs.py --rows 16 --vocab 64 --chunk 8 --json "$out/kernels.json"
fi
cat "$out/table.md"
exit "$failed"
