#!/usr/bin/env bash
# How the code reads, in figures beside their aims.
#   bash scripts/style.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 scripts/lib/style.py
