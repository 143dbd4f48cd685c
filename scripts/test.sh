#!/usr/bin/env bash
# All checks and tests of mslime, from a fresh machine: makes its own virtual environment and installs what it needs.
#   bash scripts/test.sh                  format, lint, types, import rules, unit, engine, end-to-end and kernel tests
#   bash scripts/test.sh --fast           format, lint, types, import rules and the unit tests that are not marked `slow`
#   bash scripts/test.sh --all            also tests marked `nightly`: variations of other tests
#   bash scripts/test.sh --rehearsal      instead: GPU-only code, without a GPU (11 GB; scripts/rehearse_gpu.sh --help)
#   bash scripts/test.sh tests/unit -k x  only pytest, with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode="" chosen=(-m "not nightly")
case "${1:-}" in
  --fast) mode=fast chosen=(-m "not nightly and not slow") ;;
  --all) mode=all chosen=() ;;
  --rehearsal) mode=rehearsal ;;
esac
[ -z "$mode" ] || shift
VENV="${MSLIME_VENV:-.venv}"
bash scripts/install.sh --cpu --dev --venv "$VENV"
if [ "$mode" = rehearsal ]; then
  exec bash scripts/rehearse_gpu.sh --cpu-venv "$VENV" "$@"
fi
export PATH="$(cd "$VENV" && pwd)/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
step() { printf '\n== %s\n' "$*"; "$@"; }
step ruff format --check .
step ruff check .
step lint-imports
step pyright
# Separate processes: leftovers of one kind of test (threads, patched modules) cannot affect the others.
step python -m pytest tests/unit "${chosen[@]}" -n 3 --dist loadfile --durations=20 -W ignore
if [ "$mode" = fast ]; then
  exit 0
fi
step python -m pytest tests/engines "${chosen[@]}" -n 2 --dist loadfile --durations=20 -W ignore
step python -m pytest tests/e2e "${chosen[@]}" -n 2 --dist loadfile --durations=20 -W ignore
# Triton, for its interpreter, is installed beside the environment: SGLang on a CPU must not find it. The version is the
# one that the torch of the GPU environment requires.
triton="$VENV/triton-3.8.0"
if [ ! -d "$triton/triton" ]; then
  step "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$triton" triton==3.8.0
fi
TRITON_INTERPRET=1 PYTHONPATH="$triton" step python -m pytest tests/kernels --durations=20 -W ignore
