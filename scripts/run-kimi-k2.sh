#!/usr/bin/env bash
# GRPO on Kimi-K2, 48 nodes of 8 H200 141 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/kimi-k2 PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-kimi-k2.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model kimi-k2 "$@"
