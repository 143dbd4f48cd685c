#!/usr/bin/env bash
# GRPO on GLM-4.5-Air (106B-A12B), 6 nodes of 8 H200 141 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/glm4.5-air-106B-A12B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-glm4.5-air-106B-A12B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model glm4.5-air-106B-A12B "$@"
