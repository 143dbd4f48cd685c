#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"
run_model deepseek-v3-128gpus "$@"
