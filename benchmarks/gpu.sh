#!/usr/bin/env bash
# What needs a GPU, in four calls of less than ten minutes each, on a machine with torch >= 2.10
# built for CUDA, in the order of their worth. Every figure is written when it is measured, so a call
# that is cut off has left what it had; at most one model is on the card at a time.
#
#   benchmarks/gpu.sh first    # which kernels run, are vectors right, a full card, the speed of 650M
#   benchmarks/gpu.sh right    # vectors beside those of fair-esm, training, the limits of the card
#   benchmarks/gpu.sh time     # where does the time of 3B go, and what would each change gain?
#   benchmarks/gpu.sh files    # files to files, beside the peers; and a training
#
# RESULTS is the folder of the results (benchmarks/results). WHEELS holds wheels of what the machine
# lacks, so that no network is needed: fair-esm, biopython, nvidia-ml-py, fa3-fwd, ...; for `first`
# hypothesis too, for `files` tensorboard (each with all that it needs). MODELS,
# DEVICE=cpu, SECONDS_PER_WAY and TOKENS are for trying the script on a small machine.
set -euo pipefail
cd "$(dirname "$0")/.."
call=${1:?first, right, time or files}
results=${RESULTS:-benchmarks/results}
device=${DEVICE:-cuda}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$results"
status=0
export PYTHONUNBUFFERED=1

if [[ -n ${WHEELS:-} ]]; then
    python3 -m pip install --quiet --no-index --no-deps --target "$scratch/site" "$WHEELS"/*.whl
fi
export PYTHONPATH=$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}

# need MODULE...: what is missing is known before the first second is spent
need() {
    python3 -c 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]' \
        "$@" || {
        echo "$call needs a module that is missing here: put its wheel into WHEELS, or" \
            "pip install -c constraints.txt -e '.[dev]'" >&2
        exit 69
    }
}

# run SECONDS FILE COMMAND...: what it prints is kept as it comes; the next one runs all the same.
# A .jsonl has its rows alone: warnings, errors and how it ended are in the .txt beside it.
run() {
    local seconds=$1 file=$results/$2 errors=/dev/stdout
    shift 2
    local words=${file%.*}.txt
    [[ $file == "$words" ]] || errors=$words
    timeout --signal=TERM --kill-after=10 "$seconds" "$@" 2>"$errors" | tee "$file" || {
        echo "ended with ${PIPESTATUS[0]}: $*" | tee -a "$words"
        status=1
    }
}

bench() { # SECONDS NAME OPTIONS...
    local seconds=$1 name=$2
    shift 2
    run "$seconds" "$name.txt" python3 -m virnucpro bench --device "$device" \
        ${TOKENS:+--tokens "$TOKENS"} --json "$results/$name.json" "$@"
}

measure() { # SECONDS NAME COMMAND OPTIONS...
    local seconds=$1 name=$2
    shift 2
    run "$seconds" "$name.jsonl" python3 benchmarks/measure.py "$1" --device "$device" "${@:2}"
}

variants() { # SECONDS MODEL
    measure "$1" "gpu_time_$2" variants --models "$2" --seconds "${SECONDS_PER_WAY:-3}" \
        ${TOKENS:+--tokens "$TOKENS" --budgets "$TOKENS"}
}

files() { # SECONDS MODEL
    measure "$1" "gpu_files_$2" files --models "$2" ${TOKENS:+--tokens "$TOKENS"}
}

# warnings of a compiler or a driver that nobody has seen yet fail no test
tests() { # SECONDS NAME TESTS...
    run "$1" "$2.txt" python3 -m pytest -W default -p no:cacheprovider "${@:3}"
}

case $call in
first) # 30 + 40 + 180 + 60 + 210 + 60 seconds
    need pytest hypothesis esm
    run 30 gpu_devices.txt python3 -m virnucpro devices
    measure 40 gpu_kernels kernels
    tests 180 gpu_tests tests/test_esm2_model.py \
        tests/test_dnabert_s.py::test_a_gpu_gives_the_vectors_of_a_cpu \
        tests/test_engine.py::test_a_gpu_gives_the_vectors_of_a_cpu
    for model in $(tr , ' ' <<<"${MODELS:-650M}"); do
        measure 60 "gpu_full_$model" full --models "$model" ${TOKENS:+--tokens "$TOKENS"}
        variants 210 "$model"
        files 60 "$model"
    done
    ;;
right) # 120 + 60 + 60 + 90 seconds
    need pytest hypothesis esm
    tests 120 gpu_tests_of_training tests/test_devices.py \
        tests/test_training_loop.py::test_a_profile_waits_for_the_device \
        tests/test_training_loop.py::test_training_has_the_gradients_of_sdpa \
        tests/test_training_readers.py::test_a_gpu_reads_in_float32_as_a_cpu_does
    run 60 gpu_check.txt python3 -m virnucpro models check esm2_virnucpro --device "$device"
    run 60 gpu_check_fp32.txt python3 -m virnucpro models check esm2_virnucpro \
        --device "$device" --precision fp32
    bench 90 gpu_right --parts limits,encoder --models "${MODELS:-8M}" --quick
    ;;
time) # 280 seconds
    for model in $(tr , ' ' <<<"${MODELS:-3B}"); do
        variants 280 "$model"
    done
    ;;
files) # 60 + 150 + 180 + 60 seconds
    need torch.utils.tensorboard yaml
    for model in $(tr , ' ' <<<"${MODELS:-3B}"); do
        files 60 "$model"
    done
    for model in $(tr , ' ' <<<"${MODELS:-650M,3B}"); do
        measure "$([[ $model == 650M ]] && echo 150 || echo 180)" "gpu_peers_$model" \
            peers --models "$model" --repeats 2 ${TOKENS:+--tokens "$TOKENS"}
    done
    awk 'BEGIN { OFS = "\t"; print "path", "id", "label", "group" }
        /^>/ { id = substr($1, 2); print fasta, id, id ~ /virus/ ? "virus" : "other", id }' \
        fasta="$PWD/examples/contigs.fa" examples/contigs.fa >"$scratch/manifest.tsv"
    run 60 gpu_train.txt python3 -m virnucpro train --quiet --finetune --profile --epochs 2 \
        --batch-size 8 --device "$device" \
        --data "$scratch/manifest.tsv" --output-dir "$scratch/trained"
    ;;
*)
    echo "no call: $call; it is first, right, time or files" >&2
    exit 64
    ;;
esac
exit "$status"
