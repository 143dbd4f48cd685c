#!/usr/bin/env bash
# A run over several machines under Slurm: Ray's head on the first machine of the job, a worker on each of the others, and
# the run itself beside the head. Written for this and tried with stand-ins for Slurm's commands, not on a Slurm cluster.
#
#   sbatch --nodes 3 deploy/slurm.sh bash scripts/run-qwen3-30B-A3B.sh
#
# with MODEL and PROMPTS in the environment, and further flags behind the script's name. Give the options of your site
# (--partition, --account, --time) to sbatch. MODEL, PROMPTS, the environment and the output directory must have the same
# paths on all machines. VENV: the environment with mslime (default .venv here). RAY_PORT: default 6379.
# To end it early and save: scancel --batch --signal=TERM JOB. A plain scancel also ends Ray, and nothing can be saved.
#SBATCH --job-name=mslime
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=mslime-%j.log
# Ten minutes before the time limit the run is told to save and end.
#SBATCH --signal=B:TERM@600
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "error: no command was given" >&2
  echo "  hint: sbatch --nodes 3 deploy/slurm.sh bash scripts/run-qwen3-30B-A3B.sh" >&2
  exit 1
fi
if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
  echo "error: this is not a Slurm job" >&2
  echo "  hint: start it with sbatch; without Slurm, docs/clusters.md shows ray start" >&2
  exit 1
fi

cd "${SLURM_SUBMIT_DIR:-$PWD}"
source "${VENV:-.venv}/bin/activate"
# What Ray's workers inherit has to be set before Ray starts: no lower priority than the engines, and GPUs stay visible to
# processes that ask for none. Variables of NCCL and gloo are given with --cluster.env.
export RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 PYTHONUNBUFFERED=1
# Whoever has this token runs code on these machines. srun hands the environment on.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${machines[0]}"
# The first address that the machine names; on one with several networks, set HEAD_IP.
head_ip="${HEAD_IP:-$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname -I | awk '{ print $1 }')}"
port="${RAY_PORT:-6379}"
export RAY_ADDRESS="$head_ip:$port"
echo "Ray's head: $head ($RAY_ADDRESS); ${#machines[@]} machines: ${machines[*]}"

# In the background only: the process becomes srun, so that ending it ends what it started.
on_machine() {
  local machine="$1"
  shift
  exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$machine" "$@"
}

on_machine "$head" ray start --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false --block &
rays=($!)
for machine in "${machines[@]:1}"; do
  on_machine "$machine" ray start --address="$RAY_ADDRESS" --block &
  rays+=($!)
done

# Ends what was started here, and nothing else; Slurm would, too, when the job ends.
leave() { kill "${rays[@]}" 2>/dev/null || true; }
trap leave EXIT
# Nobody can join before the head listens.
until (exec 3<>"/dev/tcp/$head_ip/$port") 2>/dev/null; do
  kill -0 "${rays[0]}" 2>/dev/null || { echo "error: Ray's head ended; see the lines above" >&2; exit 1; }
  sleep 1
done

# The run waits for machines that are still joining. A signal to this script reaches it: it saves what was learnt.
"$@" --cluster.join-s 600 &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM INT
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do # the first wait ends with the signal, the run a little later
  status=0
  wait "$run" || status=$?
done
exit "$status"
