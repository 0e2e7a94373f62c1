#!/usr/bin/env bash
# A run on Slurm, by one command from the project's folder (on a filesystem that all nodes share, after `just setup`):
#   sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=32 --time=24:00:00 cluster/slurm.sh cifar10 --size full
# Starts a Ray cluster on the allocated nodes, submits launch/NAME.py with the given options, and ends with it.
# Two minutes before the time limit the run saves and the job queues itself again; a preempted job is queued again by
# Slurm. Either way the same command finds its own checkpoints and goes on.
#SBATCH --job-name=idn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

fail() {
    echo "idn: error: $*" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "not inside a Slurm job; submit with \`sbatch cluster/slurm.sh NAME [options]\`"
[ $# -ge 1 ] && [ -f "launch/$1.py" ] || fail "job ${1:-}: expected one of $(basename -s .py launch/*.py | xargs)"
[ -x .venv/bin/ray ] || fail "no .venv in $PWD; \`just setup\` makes it, on a machine that reaches a package index"

export PATH="$PWD/.venv/bin:$PATH" IDN_RUNS=${IDN_RUNS:-$PWD/runs} IDN_DATA=${IDN_DATA:-$PWD/data}
# Two jobs may share a node; ports below 20000 are those of Ray's workers.
port=$((20000 + SLURM_JOB_ID % 5000)) dashboard=$((25000 + SLURM_JOB_ID % 5000)) agent=$((30000 + SLURM_JOB_ID % 2500))
# Other users reach the same network, so Ray asks for a token of this job's own.
mkdir -p "$IDN_RUNS"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$IDN_RUNS/.slurm-$SLURM_JOB_ID.token
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
log=$IDN_RUNS/.slurm-$SLURM_JOB_ID.log
# Between being told to stop and being killed the run writes a checkpoint.
export RAY_JOB_STOP_WAIT_TIME_S=90

address_of() {
    local name
    name=$(scontrol show node "$1" --oneliner | grep -o 'NodeAddr=[^ ]*')
    getent ahostsv4 "${name#NodeAddr=}" | awk '{ print $1; exit }'
}

# start_ray NODE OPTIONS: a Ray node that lives as long as this script.
start_ray() {
    srun --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        ray start --block --disable-usage-stats --num-cpus="${SLURM_CPUS_PER_TASK:-1}" \
        --node-ip-address="$(address_of "$1")" --dashboard-agent-listen-port="$agent" "${@:2}" >>"$log" 2>&1 &
    started+=("$!")
}

job() { ray job "$1" --address "http://127.0.0.1:$dashboard" "${@:2}"; }

started=()
end() {
    kill -TERM "${started[@]}" 2>/dev/null || true
    wait "${started[@]}" 2>/dev/null || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap end EXIT
stopping=
trap 'stopping=yes; job stop "idn-$SLURM_JOB_ID" >/dev/null 2>&1 || true' TERM

# This script runs on the first node, so the job server needs no more than loopback.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(address_of "${nodes[0]}")
start_ray "${nodes[0]}" --head --port="$port" --include-dashboard=true --dashboard-host=127.0.0.1 \
    --dashboard-port="$dashboard"
# The server answers some seconds before it can place a job, so the proof is a job.
until job submit --no-wait -- true >/dev/null 2>&1; do
    [ "$SECONDS" -lt 300 ] || fail "Ray's job server did not answer within five minutes"
    kill -0 "${started[0]}" 2>/dev/null || fail "Ray's head did not start; $log says why"
    sleep 1
done
for node in "${nodes[@]:1}"; do start_ray "$node" --address="$head:$port"; done

# The other nodes may take their time to come up.
case " $* " in *" --wait "*) ;; *) set -- "$@" --wait 600 ;; esac
job submit --submission-id "idn-$SLURM_JOB_ID" -- python "$PWD/launch/$1.py" "${@:2}" &
submitted=$!
code=0
# A trapped signal interrupts `wait`, the job still has to end by itself.
while kill -0 "$submitted" 2>/dev/null; do wait "$submitted" && code=0 || code=$?; done

if [ -n "$stopping" ]; then
    # Preempted jobs are queued again by Slurm itself, which then refuses this.
    scontrol requeue "$SLURM_JOB_ID" 2>/dev/null || true
fi
exit "$code"
