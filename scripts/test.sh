#!/usr/bin/env bash
# All checks and tests of mslime, from a fresh machine: makes its own virtual environment and installs what it needs.
#   bash scripts/test.sh                  everything: format, lint, types, import rules, unit, engine and end-to-end tests
#   bash scripts/test.sh tests/unit -k x  only pytest, with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${MSLIME_VENV:-.venv}"
bash scripts/install.sh --cpu --dev --venv "$VENV"
export PATH="$(cd "$VENV" && pwd)/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
step() { printf '\n== %s\n' "$*"; "$@"; }
step ruff format --check .
step ruff check .
step lint-imports
step pyright
# Three processes: what one kind of test leaves in a process (threads, patched modules) cannot reach the others.
step python -m pytest tests/unit --durations=5 -W ignore
step python -m pytest tests/engines --durations=5 -W ignore
step python -m pytest tests/e2e --durations=5 -W ignore
