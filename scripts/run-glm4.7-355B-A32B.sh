#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/lib/run.sh"
run_model glm4.7-355B-A32B "$@"
