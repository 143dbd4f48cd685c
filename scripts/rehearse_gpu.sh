#!/usr/bin/env bash
# Rehearses GPU-only code on a machine without GPUs. docs/gpu_readiness.md describes what this proves.
set -euo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/common.sh
source scripts/lib/gpu.sh

usage() {
  cat <<'TEXT'
Usage: bash scripts/rehearse_gpu.sh [--venv DIR] [--cpu-venv DIR] [--out DIR] [--only TEXT] [--list] [--fresh] [--help]

Installs the GPU packages into a separate environment, builds a CUDA runtime whose device memory is host memory and
whose kernels do nothing, and runs on it, with real numbers: the trainer (every model family, parallel layouts, the flags
of every launch script, FP8), weight transfer to engines, SGLang's parser for the engines' command lines, and
mslime doctor. Finally a training step and a weight sync of full-size models on one rank of up to 1,024, without writing
tensors, compare memory with `mslime plan`.
About 11 GB and 6 minutes the first time, then about 50 minutes beside other work. Exit status 1 if a check fails.

  --venv DIR      environment for the GPU packages (default .venv-rehearsal); never one that trains
  --cpu-venv DIR  environment of scripts/install.sh --cpu, whose trainer is the reference (default .venv)
  --out DIR       references and results (default .rehearsal); an interrupted run continues there
  --only TEXT     only cases whose name contains this text
  --list          print the names of the cases, and exit
  --fresh         discard results of earlier runs

Environment:
  PYTHON              the Python to use, 3.11 or 3.12
  MSLIME_MIN_FREE_GIB required free disk space (default 16)
  pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, HTTPS_PROXY, ...) are honoured.
TEXT
}

venv="$PWD/.venv-rehearsal" cpu_venv="$PWD/.venv" out="$PWD/.rehearsal" only="" list="" fresh=""
while [ $# -gt 0 ]; do
  case "$1" in
    --venv | --cpu-venv | --out | --only)
      [ $# -ge 2 ] || fail "$1 needs a value" "see bash scripts/rehearse_gpu.sh --help"
      case "$1" in
        --venv) venv="$(absolute "$2")" ;;
        --cpu-venv) cpu_venv="$(absolute "$2")" ;;
        --out) out="$(absolute "$2")" ;;
        --only) only="$2" ;;
      esac
      shift
      ;;
    --list) list=1 ;;
    --fresh) fresh=1 ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "unknown option $1" "see bash scripts/rehearse_gpu.sh --help" ;;
  esac
  shift
done

command -v g++ >/dev/null 2>&1 || fail "no C++ compiler (g++) was found, and the stand-in CUDA runtime needs one" \
  "install it: on Debian and Ubuntu the package build-essential"
[ -x "$cpu_venv/bin/python" ] || fail "no CPU environment in $cpu_venv, whose trainer is the reference" \
  "run bash scripts/install.sh --cpu --dev, or set --cpu-venv DIR"

# The environment of scripts/install.sh --gpu, without the extension that is compiled there.
mkdir -p "$out"
stamp="$venv/.mslime-rehearsal"
wanted="$PWD $(cat pyproject.toml tests/rehearsal/cuda/* 2>/dev/null | cksum)"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  python="$(find_python)"
  need_disk "$venv" "${MSLIME_MIN_FREE_GIB:-16}"
  say "installing the GPU packages into $venv (about 11 GB, 6 minutes the first time)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" ||
    fail "$python could not make a virtual environment in $venv" "choose another location with --venv DIR"
  log="$venv/install.log"
  : >"$log"
  quietly "$log" "$venv/bin/python" -m pip --no-input install "pip>=23.3"  # older ones drop an extra without an error
  quietly "$log" "$venv/bin/python" -m pip --no-input install -e ".[gpu,dev]"
  mkdir -p "$venv/sources"
  NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE quietly "$log" \
    "$venv/bin/python" -m pip --no-input download --no-deps --no-build-isolation --no-binary :all: -d "$venv/sources" \
    "transformer_engine_torch==$TE_VERSION"
  say "building the stand-in CUDA runtime"
  "$venv/bin/python" -m tests.rehearsal.cuda.build "$venv/fake"
  printf '%s' "$wanted" >"$stamp"
fi

[ -z "$fresh" ] || rm -rf "$out/families" "$out/outcomes"
# Rehearsed files: a change to one of them invalidates all results.
state="$(find mslime mslime_plugins scripts/models scripts/lib/layouts.sh tests/rehearsal tests/fixtures tests/engines \
  pyproject.toml -type f -not -name '*.pyc' | LC_ALL=C sort | xargs cat | cksum | cut -d ' ' -f 1)"
believing=(env "LD_PRELOAD=$venv/fake/libfakecuda.so" "LD_LIBRARY_PATH=$venv/fake:${LD_LIBRARY_PATH:-}" "PYTHONPATH=$PWD" "CUDA_HOME=$venv/fake"
  TRITON_INTERPRET=1 TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$venv/bin/python" -W ignore)
if [ -n "$list" ]; then exec "${believing[@]}" -m tests.rehearsal.run "$out" --only "$only" --list; fi

OMP_NUM_THREADS=1 "$cpu_venv/bin/python" -W ignore -m tests.rehearsal.reference "$out/families" --stamp "$state" \
  >"$out/reference.log" 2>&1 ||
  fail "the CPU trainer's reference numbers could not be computed: $(tail -n 1 "$out/reference.log") (log: $out/reference.log)" \
    "run bash scripts/install.sh --cpu --dev --venv $cpu_venv, and run this again"
status=0
for part in run adapters weights kernels serving doctor full_size; do
  extra=()
  [ "$part" != kernels ] || extra=(--sources "$venv/sources")
  "${believing[@]}" -m "tests.rehearsal.$part" "$out" --only "$only" --stamp "$state" ${extra[@]+"${extra[@]}"} || status=1
done
"${believing[@]}" -m tests.rehearsal.table "$out/outcomes" --stamp "$state" | tee "$out/table.md"
exit $status
