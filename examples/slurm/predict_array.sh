#!/usr/bin/env bash
# Do a planned run in parts, as a SLURM job array: the second of three, see predict_plan.sh.
#
#   sbatch --array=1-64 examples/slurm/predict_array.sh DIR [OPTION ...]
#
# Each task does its part: every 64th slice of the input, or a share of each where there are fewer. A task that ends
# early costs nothing but its time: what it left is done by the array submitted again, or by predict_merge.sh. OPTIONs go to `virnucpro work`; without any it is
# --gpus all, so that a node whose GPUs do not answer is an error, and not a slow CPU.

# the name shown by squeue
#SBATCH --job-name=virnucpro-work
# any numbers in equal steps; %32 behind them would run 32 tasks at a time
#SBATCH --array=1-16
# one node and one task: virnucpro starts its own worker for each GPU
#SBATCH --nodes=1
#SBATCH --ntasks=1
# any number of GPUs; the results do not depend on it
#SBATCH --gres=gpu:1
# a few cores per GPU, to read and write
#SBATCH --cpus-per-task=4
# room to load the model once per GPU; use does not grow with the input
#SBATCH --mem=32G
# one slice of work; the rest of the part continues after a requeue
#SBATCH --time=04:00:00
# SIGTERM to this script (B:) two minutes before the end, ample to stop in order
#SBATCH --signal=B:TERM@120
# let SLURM start a task again after preemption or a node failure
#SBATCH --requeue
# %A is the id of the array, %a the task; a requeue keeps both, so the log must be added to
#SBATCH --output=virnucpro-work-%A-%a.log
#SBATCH --open-mode=append

set -euo pipefail

if (($# < 1)); then
    echo "usage: sbatch --array=1-N predict_array.sh DIR [OPTION ...]" >&2
    exit 64
fi

folder=$1
shift
(($#)) || set -- --gpus all

# ends a task that never gets on, for example when its time limit is too short to load the model
max_restarts=20

# --quiet: a log file is no place for a live dashboard
# in the background: bash runs a trap only once its foreground command has ended
virnucpro work --quiet "$folder" "$@" &
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

# only a task that SLURM still counts as running met its time limit: one that was cancelled must stay so, and
# one that was preempted is requeued by SLURM itself
if ((status == 143)); then
    task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    state=$(squeue --noheader --jobs="$task" --format=%T || true)
    if [[ $state == RUNNING ]] && ((${SLURM_RESTART_COUNT:-0} < max_restarts)); then
        scontrol requeue "$task"
    fi
fi
exit "$status"
