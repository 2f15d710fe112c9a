#!/usr/bin/env bash
# Train on the GPUs of several nodes, started by torchrun.
#
#   sbatch examples/slurm/train_several_nodes.sh MANIFEST OUTPUT_DIR [OPTION ...]
#
# OUTPUT_DIR must be on a file system that all nodes share: the first process writes the
# checkpoints, and all read them when the training goes on.

# the name shown by squeue
#SBATCH --job-name=virnucpro-train
#SBATCH --nodes=2
# one task per node: torchrun, which starts a process for each GPU of its node
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=08:00:00
# let SLURM start the job again after preemption or a node failure
#SBATCH --requeue
# %j is the job id, which a requeue keeps; so the log must be added to, not replaced
#SBATCH --output=virnucpro-train-%j.log
#SBATCH --open-mode=append

set -euo pipefail

if (($# < 2)); then
    echo "usage: sbatch train_several_nodes.sh MANIFEST OUTPUT_DIR [OPTION ...]" >&2
    exit 64
fi
manifest=$1 output=$2
shift 2

# the processes meet on the first node of the job
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# a port that is free there now; two jobs on one node get two
port=$(srun --nodes=1 --ntasks=1 --nodelist="$first_node" python -c '
import socket
with socket.socket() as probe:
    probe.bind(("", 0))
    print(probe.getsockname()[1])')

# srun starts torchrun once on every node, and ends all of them when one fails (--kill-on-bad-exit)
# --nproc-per-node gpu: as many processes as the node has GPUs for this job
# --rdzv-id: the job, so that another one that came by the same port would be turned away
# --quiet: a log file is no place for progress bars
# --resume: continues after the last whole epoch, and starts afresh where there is none yet
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node gpu \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first_node:$port" \
    --rdzv-id "$SLURM_JOB_ID" \
    --no-python virnucpro train --quiet --resume \
    --data "$manifest" \
    --output-dir "$output" \
    "$@"
