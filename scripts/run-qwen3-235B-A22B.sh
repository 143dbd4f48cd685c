#!/usr/bin/env bash
# GRPO on Qwen3-235B-A22B, 12 nodes of 8 H200 141 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/qwen3-235B-A22B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-qwen3-235B-A22B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model qwen3-235B-A22B "$@"
