#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"
run_model qwen3-4B "$@"
