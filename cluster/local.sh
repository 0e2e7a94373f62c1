#!/usr/bin/env bash
# A Ray cluster of one machine with its job server: `up`, `down`, `submit NAME [options of idn train]`.
# It listens on loopback and asks for a token, which Ray keeps in the user's home (RAY_AUTH_TOKEN_PATH moves it).
set -euo pipefail
cd "$(dirname "$0")/.."
state=${IDN_CLUSTER_STATE:-${TMPDIR:-/tmp}/idn-cluster-$(id -u)}
port=${IDN_CLUSTER_PORT:-6379} dashboard=${IDN_DASHBOARD_PORT:-8265}
export RAY_AUTH_MODE=token
# Ray's switch for systems without clusters: with it 127.0.0.1 stays 127.0.0.1 instead of becoming all interfaces.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0

fail() {
    echo "idn: error: $*" >&2
    exit 2
}

running() { [ -f "$state/pid" ] && kill -0 "$(cat "$state/pid")" 2>/dev/null; }

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

job() { ray job submit --address "http://127.0.0.1:$dashboard" "$@"; }

# Ray makes a token in its usual place only.
make_token() {
    if [ -z "${RAY_AUTH_TOKEN_PATH:-}" ]; then
        ray get-auth-token --generate >/dev/null 2>&1
    elif [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
        (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
    fi
}

up() {
    running && fail "a cluster is up already (process $(cat "$state/pid")); just cluster-down ends it"
    for taken in "$port" "$dashboard"; do
        if answers "$taken"; then fail "port $taken is in use; set IDN_CLUSTER_PORT or IDN_DASHBOARD_PORT to free ones"; fi
    done
    mkdir -p "$state"
    make_token
    # Jobs run in a copy of the working folder that Ray deletes: what they read and leave belongs here.
    export IDN_RUNS=${IDN_RUNS:-$PWD/runs} IDN_DATA=${IDN_DATA:-$PWD/data}
    # The agent that starts jobs takes any free port: its usual one may belong to another Ray on this machine.
    nohup ray start --head --block --disable-usage-stats --node-ip-address=127.0.0.1 --port="$port" \
        --dashboard-agent-listen-port=0 \
        --include-dashboard=true --dashboard-host=127.0.0.1 --dashboard-port="$dashboard" "$@" \
        >"$state/log" 2>&1 &
    echo $! >"$state/pid"
    while ((SECONDS < 120)); do
        running || fail "the cluster did not start; $state/log says why"
        # The server answers some seconds before it can place a job, so the proof is a job.
        if answers "$dashboard" && job --no-wait -- true >/dev/null 2>&1; then
            echo "cluster up: dashboard http://127.0.0.1:$dashboard, jobs by \`just submit cifar10\`, runs in $IDN_RUNS"
            return
        fi
        sleep 1
    done
    fail "the job server did not answer within two minutes; $state/log says why"
}

down() {
    running || fail "no cluster of ours is up"
    # `ray start --block` ends the processes that it started, and only those.
    kill -TERM "$(cat "$state/pid")"
    # Ray lets running work drain for up to half a minute.
    for _ in $(seq 90); do
        running || break
        sleep 1
    done
    rm -f "$state/pid"
    echo "cluster down"
}

submit() {
    [ $# -ge 1 ] || fail "submit what? one of $(basename -s .py launch/*.py | xargs)"
    [ -f "launch/$1.py" ] || fail "no launch/$1.py; expected one of $(basename -s .py launch/*.py | xargs)"
    answers "$dashboard" || fail "no cluster answers on port $dashboard; start one with \`just cluster-up\`"
    job --working-dir . -- python "launch/$1.py" "${@:2}"
}

case "${1:-}" in
up | down | submit) "$@" ;;
*) fail "usage: cluster/local.sh up|down|submit NAME [options]" ;;
esac
