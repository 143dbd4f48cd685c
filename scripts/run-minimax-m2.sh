#!/usr/bin/env bash
# GRPO on MiniMax-M2, 12 nodes of 8 H200 141 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/minimax-m2 PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-minimax-m2.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model minimax-m2 "$@"
