#!/usr/bin/env bash
# Plan a run for many machines, as a SLURM job: the first of three.
#
#   plan=$(sbatch --parsable examples/slurm/predict_plan.sh INPUT DIR OPTION ...)
#   work=$(sbatch --parsable --dependency=afterok:$plan examples/slurm/predict_array.sh DIR)
#   sbatch --dependency=afterany:$work examples/slurm/predict_merge.sh INPUT DIR OPTION ...
#
# OPTIONs go to `virnucpro predict`, the same in both places: --model and --head, as names or as paths that all
# nodes see, and --precision: bf16 for GPUs from Ampere on, fp16 for older ones, fp32 for CPUs.
# DIR lies on a file system that all nodes share.

# the name shown by squeue
#SBATCH --job-name=virnucpro-plan
# one process hashes the input and lists its slices; it needs no GPU
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=08:00:00
# %j is the job id
#SBATCH --output=virnucpro-plan-%j.log

set -euo pipefail

if (($# < 2)); then
    echo "usage: sbatch predict_plan.sh INPUT DIR OPTION ..." >&2
    exit 64
fi

# --quiet: a log file is no place for a live dashboard
# --resume: what is planned already stays, so the job may be started again
virnucpro predict --plan-only --quiet --resume --input "$1" --output-dir "$2" "${@:3}"
