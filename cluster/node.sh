#!/usr/bin/env bash
# Starts Ray on a cloud machine that `ray up` made, inside the image: `node.sh head` or `node.sh worker`.
# Machines reach each other in their private network only; jobs come through `ray dashboard`, an SSH tunnel.
set -euo pipefail
export RAY_AUTH_MODE=token
ulimit -n 65536
# The machine is the cluster's alone. A second `ray up` starts Ray anew.
ray stop
case "${1:-}" in
head)
    # Between being told to stop and being killed, a run writes a checkpoint.
    export RAY_JOB_STOP_WAIT_TIME_S=90
    ray start --head --port=6379 --object-manager-port=8076 --disable-usage-stats --dashboard-host=127.0.0.1 \
        --autoscaling-config="$HOME/ray_bootstrap_config.yaml"
    ;;
worker) ray start --address="$RAY_HEAD_IP:6379" --object-manager-port=8076 --disable-usage-stats ;;
*)
    echo "idn: error: usage: cluster/node.sh head|worker" >&2
    exit 2
    ;;
esac
