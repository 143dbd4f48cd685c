#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B, one node of 8 H100 80 GB that trainer and engines share. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/qwen3-30B-A3B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-qwen3-30B-A3B-8gpus.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model qwen3-30B-A3B-8gpus "$@"
