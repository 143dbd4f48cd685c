#!/usr/bin/env bash
# GRPO on Llama-3.1-8B, one node of 8 H100 80 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/llama3.1-8B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-llama3.1-8B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model llama3.1-8B "$@"
