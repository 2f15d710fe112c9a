#!/usr/bin/env bash
# Find viral contigs on this machine, with all its GPUs (or the CPU, where there is none).
#
#   examples/run_predict.sh INPUT OUTPUT_DIR [more options of virnucpro predict]
#
# for example
#
#   examples/run_predict.sh examples/contigs.fa results
#   examples/run_predict.sh examples/contigs.fa results --model path/to/model --head path/to/head
set -euo pipefail

if (($# < 2)); then
    echo "usage: $0 INPUT OUTPUT_DIR [more options of virnucpro predict]" >&2
    exit 64 # what virnucpro itself returns for a usage mistake
fi

input=$1      # FASTA file or folder; plain or compressed
output_dir=$2 # the run folder; a folder that already holds a run needs --resume or --force
shift 2

# a failure is explained below, so it must not end the script here
status=0
virnucpro predict \
    --input "$input" \
    --output-dir "$output_dir" \
    "$@" || status=$?

case $status in
    0)
        echo "done: one row per contig is in $output_dir/predictions.tsv" >&2
        ;;
    2)
        echo "partial: the results in $output_dir are complete but for what failed" >&2
        echo "  see what failed and why:  $output_dir/failed_files.txt" >&2
        if [[ -e $output_dir/failed_sequences.fa ]]; then # not if whole files failed
            echo "  the sequences concerned:  $output_dir/failed_sequences.fa" >&2
        fi
        echo "  try those again:          the same command with --resume" >&2
        ;;
    130 | 143)
        echo "interrupted: finished work is kept; continue with the same command and --resume" >&2
        ;;
    *)
        echo "failed with exit code $status: the message above says why" >&2
        ;;
esac
exit "$status"
