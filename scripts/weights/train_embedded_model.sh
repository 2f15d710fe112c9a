#!/usr/bin/env bash
# Trains the built-in model, virnucpro/embedded/: about 1.5 hours on two CPU cores.
#
#   scripts/weights/train_embedded_model.sh CATALOGUE.tsv.gz WORK
#
# CATALOGUE lists labelled sequences and is in the folder of their FASTA files (see embedded_manifest.py).
# embedded_split.tsv assigns its groups to training, validation and test. An interrupted run is resumed.
# docs/MODEL_CARD.md has the results.
#
# To train another encoder, for example on a GPU and with short frames in its training set:
#
#   DEVICE=cuda LAYERS=6 DIM=256 HEADS=8 EPOCHS=20 CHUNKS="500 300 150" scripts/weights/train_embedded_model.sh CATALOGUE.tsv.gz WORK
set -euo pipefail

catalogue=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
python3 "$here/embedded_manifest.py" "$catalogue" > "$work/manifest.tsv"
data=(--data "$work/manifest.tsv" --split "$here/embedded_split.tsv")
run=(--device "${DEVICE:-cpu}" --precision bf16 --resume --quiet)
chunks=()
for size in ${CHUNKS:-500}; do chunks+=(--chunk-size "$size"); done

virnucpro train --pretrain "${data[@]}" "${run[@]}" --output-dir "$work/pretrained" --seed 1 \
    --layers "${LAYERS:-6}" --dim "${DIM:-128}" --heads "${HEADS:-4}" \
    --epochs "${EPOCHS:-2}" --lr 1e-3 "${chunks[@]}"
mkdir -p "$work/virnucpro-tiny"  # heads name the encoder by its folder
cp "$work/pretrained/model/"* "$work/virnucpro-tiny/"

virnucpro train "${data[@]}" "${run[@]}" --output-dir "$work/head" --seed 1 \
    --model "$work/virnucpro-tiny" --epochs 10 --lr 3e-3 --dropout 0.1

virnucpro evaluate "${data[@]}" "${run[@]}" --output-dir "$work/evaluation" --part test \
    --model "$work/head/model"

echo "To ship it: cp -r $work/virnucpro-tiny $work/head/model/head.safetensors virnucpro/embedded/"
