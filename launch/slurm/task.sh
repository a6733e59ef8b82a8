#!/usr/bin/env bash
# One task a node (srun): accelerate's launcher and its processes, one for each GPU.
set -euo pipefail

# Slurm signals every process of the step. The launcher has to outlive the signal that the training processes act on:
# it would die of USR1, and on TERM kill them half a minute later. An ignored signal stays ignored in what is started
# here, but for the training processes, which set handlers of their own. PET_ is torchrun's prefix for its options.
trap '' USR1 TERM
export PET_SIGNALS_TO_HANDLE=SIGINT

per_node="${SLURM_GPUS_ON_NODE:-1}"
exec "$PY" -m accelerate.commands.launch --config_file "$DRAFTKV_LAUNCH" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes $((SLURM_NNODES * per_node)) \
    --main_process_ip "$DRAFTKV_MAIN_HOST" --main_process_port "$DRAFTKV_MAIN_PORT" train/distill.py "$@"
