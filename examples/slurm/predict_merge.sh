#!/usr/bin/env bash
# Bring a planned run to its end, as a SLURM job: the third of three, see predict_plan.sh. Or do a whole run in
# one job: the same without the other two.
#
#   sbatch examples/slurm/predict_merge.sh INPUT DIR [OPTION ...]
#
# What parts left out is done here, then the tables are joined. OPTIONs go to `virnucpro predict`:
# --no-embed, with --gres=none before the script, refuses to embed, for a node without a GPU.
# Without --model nothing is embedded, and one core scores millions of bases a second.
# Compute nodes are often offline: give --model and --head, if any, as paths on a shared file system.

# the name shown by squeue
#SBATCH --job-name=virnucpro
# one node: the workers of a run share one machine
#SBATCH --nodes=1
# one task: virnucpro starts its own worker for each GPU
#SBATCH --ntasks=1
# two GPUs; any number works, and the results do not depend on it
#SBATCH --gres=gpu:2
# a few cores per GPU, to read, translate and write
#SBATCH --cpus-per-task=8
# room to load the model once per GPU; use does not grow with the input
#SBATCH --mem=64G
# one slice of work; the rest continues after a requeue
#SBATCH --time=08:00:00
# SIGTERM to this script (B:) two minutes before the end, ample to stop in order
#SBATCH --signal=B:TERM@120
# let SLURM start the job again after preemption or a node failure
#SBATCH --requeue
# %j is the job id, which a requeue keeps
#SBATCH --output=virnucpro-%j.log
# so the log must be added to, not replaced
#SBATCH --open-mode=append

set -euo pipefail

if (($# < 2)); then
    echo "usage: sbatch predict_merge.sh INPUT DIR [OPTION ...]" >&2
    exit 64
fi

# ends a job that never gets on, for example when its time limit is too short to load the model
max_restarts=20

# --quiet: a log file is no place for a live dashboard
# --resume: continues a run folder, and starts afresh where there is none yet
# in the background: bash runs a trap only once its foreground command has ended
virnucpro predict --quiet --resume \
    --input "$1" \
    --output-dir "$2" \
    "${@:3}" &
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

case $status in
    0) ;;
    2)
        # not requeued: the same sequences would most likely fail again
        echo "partial: see $2/failed_files.txt" >&2
        ;;
    143)
        # only a job that SLURM still counts as running met its time limit: one that was cancelled
        # must stay so, and one that was preempted is requeued by SLURM itself
        state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T || true)
        if [[ $state == RUNNING ]] && ((${SLURM_RESTART_COUNT:-0} < max_restarts)); then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        ;;
    *)
        # not requeued: wrong input, a missing model or a full disk needs a person
        echo "failed with exit code $status: see $2/virnucpro.log" >&2
        ;;
esac
exit "$status"
