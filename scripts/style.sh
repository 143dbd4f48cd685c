#!/usr/bin/env bash
# Figures on the style of the code, beside their aims.
#   bash scripts/style.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 scripts/lib/style.py
