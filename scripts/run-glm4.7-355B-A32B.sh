#!/usr/bin/env bash
# GRPO on GLM-4.7 (355B-A32B), 12 nodes of 8 H200 141 GB. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/glm4.7-355B-A32B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-glm4.7-355B-A32B.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model glm4.7-355B-A32B "$@"
