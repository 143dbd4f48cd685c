#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"
run_model qwen2.5-0.5B "$@"
