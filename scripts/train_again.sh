#!/usr/bin/env bash
# Restarts a run when it fails; it continues from its newest checkpoint. A run that has not made a step, or that a
# signal ended, is not restarted.
#   bash scripts/train_again.sh outputs/NAME mslime train run.yaml
# RESTARTS: failures in a row (3); a new checkpoint resets the count.
set -euo pipefail
run_dir="$1"
shift
checkpoints() { ls -d "$run_dir"/{,adapters/*/}checkpoints/step_* 2>/dev/null || true; }
metrics() { cat "$run_dir"/{,adapters/*/}metrics.jsonl 2>/dev/null | cksum || true; }

# child COMMAND...: runs it to its end and sets status. A signal interrupts `wait`, so wait again.
child() {
  "$@" &
  process=$!
  if [ -n "$stopped" ]; then kill -TERM "$process"; fi  # the signal arrived while the process was starting
  while kill -0 "$process" 2>/dev/null; do wait "$process" || true; done
  wait "$process" && status=0 || status=$?
}

# Bash starts background processes with Ctrl-C ignored. A closed terminal sends SIGHUP to the run itself.
failures=0 progress= stopped= process=
trap 'stopped=143; [ -z "$process" ] || kill -TERM "$process" 2>/dev/null || true' TERM INT
trap 'stopped=129' HUP
while true; do
  checkpoints_before="$(checkpoints)" metrics_before="$(metrics)"
  child "$@"
  case "$status" in 0 | 129 | 130 | 143) exit "$status" ;; esac
  [ -z "$stopped" ] || exit "$status"
  [ "$(metrics)" = "$metrics_before" ] || progress=1
  if [ "$(checkpoints)" != "$checkpoints_before" ]; then failures=0 progress=1; fi
  failures=$((failures + 1))
  if [ -z "$progress" ] || [ "$failures" -gt "${RESTARTS:-3}" ]; then exit "$status"; fi
  pause=$((failures * 15 - 14))  # frees memory and ports of dead processes, and lets a restarted machine come back
  echo "the run failed with status $status; restarting it in $pause s ($failures of ${RESTARTS:-3} in a row)" >&2
  child sleep "$pause"
  [ -z "$stopped" ] || exit "$stopped"
done
