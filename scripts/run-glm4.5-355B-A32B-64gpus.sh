#!/usr/bin/env bash
# GRPO on GLM-4.5 (355B-A32B), 8 nodes of 8 H100 80 GB that trainer and engines share. Checks and plans the run, then starts it; further flags win over these.
#   MODEL=/models/glm4.5-355B-A32B PROMPTS=/data/math.jsonl HELD_OUT=/data/aime.jsonl bash scripts/run-glm4.5-355B-A32B-64gpus.sh [--flag value ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"

run_model glm4.5-355B-A32B-64gpus "$@"
