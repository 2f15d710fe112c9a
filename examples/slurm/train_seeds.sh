#!/usr/bin/env bash
# Train the same network with several seeds, one GPU each: how much of a difference is luck?
#
#   sbatch examples/slurm/train_seeds.sh MANIFEST OUTPUT_DIR [OPTION ...]
#
# At the end: virnucpro summary OUTPUT_DIR/seed_*
#
# Give --split TABLE, the table that a first training wrote: without it every seed has a split of
# its own, and what differs is the data as well as the luck.

# the name shown by squeue
#SBATCH --job-name=virnucpro-seeds
# a job for each of the seeds 0 to 4; %2 would run two of them at a time
#SBATCH --array=0-4
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --time=04:00:00
# let SLURM start a job again after preemption or a node failure
#SBATCH --requeue
# %A is the id of the array, %a the seed
#SBATCH --output=virnucpro-seeds-%A-%a.log
#SBATCH --open-mode=append

set -euo pipefail

if (($# < 2)); then
    echo "usage: sbatch train_seeds.sh MANIFEST OUTPUT_DIR [OPTION ...]" >&2
    exit 64
fi
manifest=$1 output=$2
shift 2

# a folder for each seed: two trainings never share one
# --quiet: a log file is no place for progress bars
# --resume: continues after the last whole epoch, and starts afresh where there is none yet
virnucpro train --quiet --resume --gpus all \
    --seed "$SLURM_ARRAY_TASK_ID" \
    --data "$manifest" \
    --output-dir "$output/seed_$SLURM_ARRAY_TASK_ID" \
    "$@"
