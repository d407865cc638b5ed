#!/usr/bin/env bash
# Two nodes on one machine: two network namespaces, joined by a cable, each with its own torchrun
# agent. Needs root on Linux. On a cluster, run the line of `agent` on each node instead.
set -euo pipefail
cd "$(dirname "$0")"
ranks=${RANKS_PER_NODE:-1}

agent() { # agent NODE: the command of one node
    ip netns exec "penstock$1" env GLOO_SOCKET_IFNAME="cable$1" OMP_NUM_THREADS=1 \
        "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes 2 --node-rank "$1" --nproc-per-node "$ranks" \
        --master-addr 10.77.0.1 --master-port 29500 "${SCRIPT:-train.py}"
}

cleanup() { for node in 0 1; do ip netns delete "penstock$node" 2> /dev/null || true; done; }
trap cleanup EXIT
for node in 0 1; do ip netns add "penstock$node"; done
ip link add cable0 netns penstock0 type veth peer name cable1 netns penstock1
for node in 0 1; do
    ip -n "penstock$node" address add "10.77.0.$((node + 1))/24" dev "cable$node"
    ip -n "penstock$node" link set "cable$node" up
    ip -n "penstock$node" link set lo up
done
agent 1 &
agent 0
wait %1
