#!/usr/bin/env bash
# Measure everything that needs a GPU, in four calls of less than ten minutes each, the most useful
# first. The machine needs torch >= 2.10 built for CUDA. Every figure is written as soon as it is
# measured, so an interrupted call keeps its figures. At most one model is on the card at a time.
#
#   benchmarks/gpu.sh right    # correctness: kernels, tests, a full card, limits
#   benchmarks/gpu.sh time     # time per kernel of 650M and 3B, and the gain of each change
#   benchmarks/gpu.sh short    # reads of 150 bases: attention in tiles of 64, by model
#   benchmarks/gpu.sh files    # files to files, compared with other programs, and a training
#
# Before you pay for a card, on any machine:
#
#   benchmarks/gpu.sh --dry-run right     # print the commands of a call, and run none
#   benchmarks/gpu.sh --rehearse right    # run them on the CPU with a tiny model, and collect tests
#
# Variables:
#   RESULTS          folder for the results (benchmarks/results)
#   WHEELS           folder with wheels that the machine lacks, so that no network is needed:
#                    fair-esm, biopython, backports.zstd, nvidia-ml-py, ... For `right` hypothesis
#                    too, for `files` tensorboard, each with its dependencies
#   MODELS           models instead of those of the call (15B can be one for `time`)
#   DEVICE           device (cuda)
#   SECONDS_PER_WAY  seconds for each measurement (3)
#   TOKENS           tokens per batch
set -euo pipefail
cd "$(dirname "$0")/.."
mode=run
case ${1:-} in
--dry-run | --rehearse)
    mode=${1#--}
    shift
    ;;
esac
call=${1:-}
case $call in
right | time | short | files) ;;
*)
    echo "usage: benchmarks/gpu.sh [--dry-run|--rehearse] right|time|short|files" >&2
    exit 64
    ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ $mode == rehearse ]]; then
    RESULTS=${RESULTS:-$scratch/results}
    DEVICE=cpu MODELS=tiny TOKENS=${TOKENS:-600} SECONDS_PER_WAY=0
fi
results=${RESULTS:-benchmarks/results}
device=${DEVICE:-cuda}
status=0
export PYTHONUNBUFFERED=1

if [[ $mode != dry-run ]]; then
    mkdir -p "$results"
    if [[ -n ${WHEELS:-} ]]; then
        python3 -m pip install --quiet --no-index --no-deps --target "$scratch/site" "$WHEELS"/*.whl
    fi
fi
export PYTHONPATH=$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}

# need MODULE...: fail at once if a module is missing
need() {
    [[ $mode != dry-run ]] || return 0
    python3 -c 'import ctypes, importlib, sys
[importlib.import_module(name) for name in sys.argv[1:]]
ctypes.CDLL(str(sys.modules["virnucpro.core.native"].LIBRARY))' \
        Bio esm h5py pynvml virnucpro.sequences.fasta virnucpro.core.native "$@" || {
        echo "$call needs what is missing here: put the wheel of a module into WHEELS; libscorer.so" \
            "comes with the checkout, or by pip install -c constraints.txt -e '.[dev]'" >&2
        exit 69
    }
}

# run SECONDS FILE COMMAND...: write the output as it comes, and continue after a failure.
# A .jsonl has only rows. Warnings, errors and the exit code are in the .txt next to it.
run() {
    local seconds=$1 file=$results/$2 errors=/dev/stdout
    shift 2
    if [[ $mode == dry-run ]]; then
        printf '%4s s ' "$seconds"
        printf ' %q' "$@"
        printf '\n'
        return
    fi
    [[ $mode != rehearse ]] || seconds=$((10 * seconds)) # a CPU is slower, and perhaps busy
    local words=${file%.*}.txt
    [[ $file == "$words" ]] || errors=$words
    timeout --signal=TERM --kill-after=10 "$seconds" "$@" 2>"$errors" | tee "$file" || {
        echo "ended with ${PIPESTATUS[0]}: $*" | tee -a "$words"
        status=1
    }
}

measure() { # SECONDS NAME COMMAND OPTIONS...
    local seconds=$1 name=$2
    shift 2
    run "$seconds" "$name.jsonl" python3 benchmarks/measure.py "$1" --device "$device" "${@:2}"
}

# of_models MODELS: print the names, one per line
of_models() {
    tr , '\n' <<<"${MODELS:-$1}"
}

variants() { # SECONDS MODEL NAME OPTIONS...
    measure "$1" "gpu_$3_$2" variants --models "$2" --seconds "${SECONDS_PER_WAY:-3}" \
        ${TOKENS:+--tokens "$TOKENS" --budgets "$TOKENS"} "${@:4}"
}

files() { # SECONDS MODEL
    measure "$1" "gpu_files_$2" files --models "$2" ${TOKENS:+--tokens "$TOKENS"}
}

# Unknown warnings from a compiler or a driver do not fail a test.
tests() { # SECONDS NAME TESTS...
    local collect=()
    [[ $mode != rehearse ]] || collect=(--collect-only --quiet)
    run "$1" "$2.txt" python3 -m pytest -W default -p no:cacheprovider --numprocesses 4 \
        "${collect[@]}" "${@:3}"
}

# Calls on this device and on the CPU must be equal.
predict() { # SECONDS
    local contigs=(python3 -m virnucpro predict --input examples/contigs.fa --model virnucpro-tiny)
    run "$1" gpu_predict.txt "${contigs[@]}" --output-dir "$scratch/there" --device "$device"
    run "$1" gpu_predict_cpu.txt "${contigs[@]}" --output-dir "$scratch/here" --device cpu
    run 10 gpu_predict_compared.txt python3 -m virnucpro compare --tolerance 0 \
        "$scratch/here" "$scratch/there"
}

check() { # NAME OPTIONS...
    run 30 "$1.txt" python3 -m virnucpro models check virnucpro-tiny --device "$device" "${@:2}"
}

case $call in
right) # 10 + 60 + 2 * 25 + 10 + 100 + 75 + 4 * 30 + 75 seconds
    need pytest xdist hypothesis
    [[ $device != cuda ]] || run 10 gpu_card.txt nvidia-smi --format=csv \
        --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu
    run 60 gpu_devices.txt python3 -m virnucpro devices
    predict 25
    tests 100 gpu_tests -k 'cuda or gpu' tests/unit/test_esm2_model.py \
        tests/integration/test_dnabert_s.py::test_gpu_gives_the_vectors_of_a_cpu \
        tests/integration/test_engine.py::test_gpu_gives_the_vectors_of_a_cpu
    for model in $(of_models 650M); do
        measure 75 "gpu_full_$model" full --models "$model" ${TOKENS:+--tokens "$TOKENS"}
    done
    check gpu_check
    check gpu_check_fp32 --precision fp32
    check gpu_check_fp8 --precision fp8
    check gpu_check_int8 --precision int8
    run 75 gpu_right.txt python3 -m virnucpro bench --device "$device" --json \
        "$results/gpu_right.json" --models 8M --quick
    ;;
time) # 280 + 310 seconds
    need
    for model in $(of_models 650M,3B); do
        variants "$([[ $model == 650M ]] && echo 280 || echo 310)" "$model" time
    done
    ;;
short) # 4 * 140 seconds
    need
    for model in $(of_models 8M,35M,150M,650M); do
        variants 140 "$model" short --profile reads-150 --ways GELU-by-tanh \
            attention-in-shared-tiles attention-in-shared-tiles-that-rotate
    done
    ;;
files) # 60 + 100 + 130 + 160 + 60 + 60 seconds
    need pytest xdist hypothesis torch.utils.tensorboard yaml
    for model in $(of_models 650M,3B); do
        files "$([[ $model == 650M ]] && echo 60 || echo 100)" "$model"
    done
    for model in $(of_models 650M,3B); do
        measure "$([[ $model == 650M ]] && echo 130 || echo 160)" "gpu_peers_$model" \
            peers --models "$model" --repeats 2 ${TOKENS:+--tokens "$TOKENS"}
    done
    n_lines=$([[ $mode == rehearse ]] && echo 12 || echo 1000000) # of each contig
    awk -v n="$n_lines" '/^>/ { line = 0 } line++ <= n' examples/contigs.fa >"$scratch/contigs.fa"
    awk 'BEGIN { OFS = "\t"; print "path", "id", "label", "group" }
        /^>/ { id = substr($1, 2); print fasta, id, id ~ /virus/ ? "virus" : "other", id }' \
        fasta="$scratch/contigs.fa" "$scratch/contigs.fa" >"$scratch/manifest.tsv"
    run 60 gpu_train.txt python3 -m virnucpro train --quiet --finetune --profile --epochs 2 \
        --batch-size 8 --device "$device" --model virnucpro-tiny \
        --data "$scratch/manifest.tsv" --output-dir "$scratch/trained"
    tests 60 gpu_tests_of_training tests/unit/test_devices.py \
        tests/integration/test_training_loop.py::test_profile_waits_for_the_device \
        tests/integration/test_training_loop.py::test_training_has_the_gradients_of_sdpa \
        tests/unit/test_training_readers.py::test_gpu_reads_in_float32_like_a_cpu
    ;;
esac
exit "$status"
