#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on a machine with torch >= 2.10 built for CUDA: the tests
# of every kernel and precision, a run on all GPUs against one on the CPU, and the figures of
# `virnucpro bench` and of benchmarks/measure.py. Meant to take less than nine minutes on an H200.
#
#   WHEELS=folder RESULTS=folder benchmarks/gpu.sh
#
# WHEELS holds wheels of what the machine lacks (fair-esm, biopython, nvidia-ml-py, ...), so that no
# network is needed; leave it out where the dependencies are installed. MODELS, PROFILES and
# SECONDS_FOR_BENCH change what is measured, and for how long at most.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${RESULTS:-benchmarks/results}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$results"
status=0

if [[ -n ${WHEELS:-} ]]; then
    python3 -m pip install --quiet --no-index --no-deps --target "$scratch/site" "$WHEELS"/*.whl
fi
export PYTHONPATH=$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}

python3 -m virnucpro devices | tee "$results/gpu_devices.txt"
python3 -m pytest tests/test_esm2_model.py tests/test_devices.py \
    tests/test_training_clock.py tests/test_training_loop.py::test_the_kernel_of_gpus_has_the_gradients_of_that_of_cpus \
    tests/test_engine.py::test_a_gpu_gives_the_vectors_of_a_cpu 2>&1 |
    tee "$results/gpu_tests.txt" || status=$? # the figures are wanted all the same

for device in cuda cpu; do
    python3 -m virnucpro predict --quiet --model esm2_virnucpro --device "$device" --precision fp32 \
        --input examples/contigs.fa --output-dir "$scratch/$device"
done
# scores of two kinds of device differ by rounding: this shows how many rows do
diff "$scratch"/{cuda,cpu}/predictions.tsv | tee "$results/gpu_cpu_difference.txt" || true

# two epochs on all GPUs: that it trains, and how many frames it takes in a second
awk 'BEGIN { OFS = "\t"; print "path", "id", "label", "group" }
    /^>/ { id = substr($1, 2); print fasta, id, id ~ /virus/ ? "virus" : "other", id }' \
    fasta="$PWD/examples/contigs.fa" examples/contigs.fa >"$scratch/manifest.tsv"
python3 -m virnucpro train --quiet --finetune --profile --epochs 2 --batch-size 8 \
    --data "$scratch/manifest.tsv" --output-dir "$scratch/trained" 2>&1 |
    tee "$results/gpu_train.txt" || status=$?

# every row is kept as it comes: what is cut off at the end of the time still leaves figures
timeout --signal=TERM "${SECONDS_FOR_BENCH:-360}" \
    python3 -m virnucpro bench --device cuda \
    --models "${MODELS:-650M,3B,8M}" --profiles "${PROFILES:-six-frame-500,proteins}" \
    --repeats 3 --json "$results/bench_gpu.json" |
    tee "$results/bench_gpu.txt" || echo "bench ended with ${PIPESTATUS[0]}"
for part in "files --device cuda --models 650M" "graphs --models 8M"; do
    # shellcheck disable=SC2086  # a part and its options
    timeout --signal=TERM 60 python3 benchmarks/measure.py $part \
        >"$results/gpu_${part%% *}.json" || echo "$part ended with $?"
done
exit "$status"
