#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"
run_model moonlight-16B-A3B "$@"
