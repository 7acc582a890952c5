#!/bin/bash
# llama-3.1-70b in dp=4 tp=8: 32 ranks, 4 nodes with 8 GPUs each. Made by `fivefold launch
# torchrun` from examples/launch/plan.toml: make it again when the plan changes.
#
#     MASTER_ADDR=FIRST_NODE bash examples/launch/train.sh
#
# It is the same on all 4 nodes: start it on each. Options of fivefold train may follow, as in
# --steps 10. A run that exists is resumed.

# An unset variable or a failed command ends the script.
set -euo pipefail

# The plan, from the folder in which this script is started.
plan=examples/launch/plan.toml
# The folder of the run, which all nodes share: metrics, checkpoints, the plan as run.
run=runs/llama-3.1-70b
# The first node, by a name that the others know: set it when you start the script.
endpoint=${MASTER_ADDR:?set it to the name of the first node}:${MASTER_PORT:-29400}
# As many threads as cores for each rank; else every rank would take all of the node.
export OMP_NUM_THREADS=8
# TERM or Ctrl-C asks the ranks to stop: they write a checkpoint after the step. After so many
# seconds torchrun kills them (before torch 2.12 always after 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300

command=(
    torchrun
    # torchrun on every node meets the others at the first node. It numbers nodes by name, and
    # ranks within a node.
    --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint="$endpoint"
    # Nodes of another job that come to the same place are not let in.
    --rdzv-id=llama-3.1-70b
    # A rank for each GPU.
    --nproc-per-node=8
    # If a rank is lost, all start again from the newest good checkpoint, so often.
    --max-restarts=3
    # What ranks print goes to the terminal and to files, by rank and by start.
    --log-dir="$run/logs" --tee=3
    # The ranks.
    -m fivefold train "$plan" --out "$run" --device cuda "$@"
)
# In place of this shell, so that signals reach torchrun.
exec "${command[@]}"
