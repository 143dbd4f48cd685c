#!/usr/bin/env bash
# Makes a virtual environment and installs mslime into it, including steps beyond pip. A repeated run takes a second.
set -euo pipefail
# The constraints, pyproject.toml and this script are relative to the project; a caller's --venv is relative to the caller.
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/common.sh
source scripts/lib/gpu.sh

usage() {
  cat <<'TEXT'
Usage: bash scripts/install.sh [--cpu | --gpu] [--venv DIR] [--dev] [--from DIR] [--help]

  --cpu       the real engines without a GPU: torch for CPU, megatron-core, SGLang (default without an NVIDIA driver)
  --gpu       the engines for H100/H200: SGLang with its own torch, megatron-core, Transformer Engine with its torch
              extension (compiled here), flash-linear-attention; needs an NVIDIA driver of 580 or newer to run
  --venv DIR  location of the virtual environment (default .venv in the project)
  --dev       also packages for tests, lint and type checks
  --from DIR  --gpu without a package index: packages of this bundle (scripts/bundle.sh)

Environment:
  PYTHON              the Python to use, 3.11 or 3.12
  MSLIME_TORCH_INDEX  --cpu only: a further package index to take torch from. On Linux, pip may pick the CUDA build of torch,
                      which works here too but is several GB larger; use the CPU index from PyTorch's website.
  MSLIME_MIN_FREE_GIB required free disk space (default 6 for --cpu, 20 for --gpu)
  MSLIME_ANY_DRIVER   --gpu only: 1 installs beside an NVIDIA driver that is too old
  MAX_JOBS            --gpu only: parallel compilers for the extension (default: one for each core and 4 GiB of memory)
  pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, HTTPS_PROXY, ...) are honoured.
TEXT
}

mode="" venv=".venv" extras_dev="" bundle=""
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu | --gpu) mode="${1#--}" ;;
    --dev) extras_dev=",dev" ;;
    --venv | --from)
      [ $# -ge 2 ] || fail "$1 needs a directory" "use $1 DIR"
      if [ "$1" = --venv ]; then venv="$(absolute "$2")"; else bundle="$(absolute "$2")"; fi
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "unknown option $1" "see bash scripts/install.sh --help" ;;
  esac
  shift
done
if [ -z "$mode" ]; then
  if command -v nvidia-smi >/dev/null 2>&1; then mode=gpu; else mode=cpu; fi
fi

[ -z "$bundle" ] || [ "$mode$extras_dev" = gpu ] ||
  fail "--from installs the GPU packages alone" "use bash scripts/install.sh --gpu --from $bundle, without --cpu and --dev"

# The stamp describes the inputs of the installation. It is written last: an interrupted run starts over.
stamp="$venv/.mslime-installed"
wanted="$mode$extras_dev ${MSLIME_TORCH_INDEX:-} $PWD $(cat pyproject.toml requirements/*.txt scripts/install.sh \
  scripts/lib/common.sh scripts/lib/gpu.sh scripts/lib/imports.py | cksum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c 'import mslime' 2>/dev/null; then
  say "mslime ($mode$extras_dev) is already installed in $venv and up to date"
  exit 0
fi

python="$(find_python)"
if [ "$mode" = cpu ]; then default_gib=6; else default_gib=20; fi
if [ "$mode" = gpu ]; then
  check_driver
  [ -n "$bundle" ] || check_compiler "$python"
fi
need_disk "$venv" "${MSLIME_MIN_FREE_GIB:-$default_gib}"

wheels=""
if [ -n "$bundle" ]; then
  check_bundle "$bundle"
  mkdir -p "$(dirname "$venv")"
  wheels="$(mktemp -d "$(dirname "$venv")/.mslime-bundle.XXXXXX")"
  trap 'rm -rf "$wheels"' EXIT
  unpack_bundle "$bundle" "$wheels" "$python"
fi

started="$(date +%s)"
say "installing mslime ($mode$extras_dev) into $venv, with $("$python" --version)"
if [ -z "$bundle" ] && [ -x "$venv/bin/python" ] &&
  [ "$("$venv/bin/python" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null)" = \
    "$("$python" -c 'import sys; print(sys.version_info[:2])')" ]; then
  rm -f "$stamp"
else
  "$python" -m venv --clear "$venv" 2>/dev/null ||
    fail "$python could not make a virtual environment in $venv" \
      "check that the directory can be written; on Debian and Ubuntu install the package python3.11-venv"
fi
log="$venv/install.log"
: >"$log" || fail "$venv cannot be written" "choose another location with --venv DIR"
pip() { quietly "$log" "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

if [ "$mode" = cpu ]; then
  say "  1/3 torch, megatron-core, ray, transformers and SGLang's dependencies on CPU (about 2.5 GB, a few minutes)"
  torch_index=()
  [ -z "${MSLIME_TORCH_INDEX:-}" ] || torch_index=(--extra-index-url "$MSLIME_TORCH_INDEX")
  pip install -c requirements/cpu-constraints.txt ${torch_index[@]+"${torch_index[@]}"} -e ".[cpu$extras_dev]"
  say "  2/3 SGLang without its dependencies: it pins CUDA packages and another torch, none of which a CPU server uses;"
  say "      xgrammar likewise, because it asks for triton (1 GB, CUDA only)"
  pip install --no-deps sglang==0.5.23 xgrammar==0.2.7
  say "  3/3 checking"
  if "$venv/bin/python" -m pip --disable-pip-version-check show torchvision >/dev/null 2>&1; then
    say "      removing torchvision: its wheel needs a CUDA torch, and transformers fails to import beside it"
    pip uninstall -y torchvision
  fi
elif [ -n "$bundle" ]; then
  say "  1/2 the packages of $bundle"
  pip install --no-index --no-deps --no-compile "$wheels"/*.whl
  "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages >>"$log" 2>&1 || true  # some are templates
  missing="$(link_left_out "$python" "$venv" "$wheels/left_out")"
  [ -z "$missing" ] || say "      in neither this bundle nor $python: $missing"
  pip install --no-index --no-deps --no-build-isolation -e .
  say "  2/2 checking"
else
  say "  1/3 SGLang with its own torch, megatron-core, ray, Transformer Engine (about 11 GB, 4 to 10 minutes)"
  pip install -e ".[gpu$extras_dev]"
  say "  2/3 Transformer Engine's torch extension, compiled against this torch (without a GPU; $(compile_jobs) compilers at a"
  say "      time, together about 25 minutes of one core; kept in $venv/wheels for the next time)"
  build_extension "$venv"
  say "  3/3 checking"
fi
if [ -n "$extras_dev" ]; then
  say "      clients of agents in a second version, for tests, beside the environment ($venv/clients, 65 MB)"
  rm -rf "$venv/clients"
  pip install --no-deps --target "$venv/clients" -r requirements/test-clients.txt
  say "      tinker-cookbook, whose recipes a nightly test runs, beside it too ($venv/cookbook, 124 MB)"
  rm -rf "$venv/cookbook"
  pip install --no-deps --target "$venv/cookbook" -r requirements/test-cookbook.txt
fi
check_imports "$venv" "$mode"
printf '%s' "$wanted" >"$stamp"
say "installed in $(($(date +%s) - started)) s; activate with: source $(printf '%q' "$venv/bin/activate")"
if [ "$mode" = gpu ]; then describe_gpus; fi
