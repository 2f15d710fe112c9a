#!/usr/bin/env bash
# Train on all GPUs of one node, as a SLURM job that survives its time limit.
#
#   sbatch examples/slurm/train_one_node.sh MANIFEST OUTPUT_DIR [OPTION ...]
#
# Options go to `virnucpro train` as they are, for example --finetune --epochs 5. Without --model the encoder is
# esm2_t33_650M_UR50D. Compute nodes are often offline: run `virnucpro models download` on a login node first.

# the name shown by squeue
#SBATCH --job-name=virnucpro-train
# one node, and one task: virnucpro starts a process for each GPU itself
#SBATCH --nodes=1
#SBATCH --ntasks=1
# any number of GPUs; --batch-size is that of one, so the effective batch grows with them
#SBATCH --gres=gpu:8
# a few cores per GPU, to make batches
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
# one slice of work; the rest continues after a requeue
#SBATCH --time=08:00:00
# SIGTERM to this script (B:) two minutes before the end
#SBATCH --signal=B:TERM@120
# let SLURM start the job again after preemption or a node failure
#SBATCH --requeue
# %j is the job id, which a requeue keeps; so the log must be added to, not replaced
#SBATCH --output=virnucpro-train-%j.log
#SBATCH --open-mode=append

set -euo pipefail

if (($# < 2)); then
    echo "usage: sbatch train_one_node.sh MANIFEST OUTPUT_DIR [OPTION ...]" >&2
    exit 64
fi
manifest=$1 output=$2
shift 2

# ends a job that never gets on, for example when its time limit is shorter than an epoch
max_restarts=20

# --quiet: a log file is no place for progress bars
# --resume: continues after the last whole epoch, and starts afresh where there is none yet
# --gpus all: all that SLURM gave this job, not all of the node
# in the background: bash runs a trap only once its foreground command has ended
virnucpro train --quiet --resume --gpus all \
    --data "$manifest" \
    --output-dir "$output" \
    "$@" &
pid=$!

# SLURM signals this shell alone (B:), so pass it on; virnucpro may have ended just before
trap 'interrupted=1; kill -TERM "$pid" 2>/dev/null || true' TERM

# a signal ends `wait` early, so wait again until virnucpro itself has ended
while true; do
    interrupted=0
    status=0
    wait "$pid" || status=$?
    ((interrupted)) || break
done

# only a job that SLURM still counts as running met its time limit: one that was cancelled must
# stay so, and one that was preempted is requeued by SLURM itself
if ((status == 143)); then
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T || true)
    if [[ $state == RUNNING ]] && ((${SLURM_RESTART_COUNT:-0} < max_restarts)); then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$status"
