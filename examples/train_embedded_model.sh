#!/usr/bin/env bash
# Makes the model that comes with VirNucPro: virnucpro/embedded/. About 2.5 hours on two CPU cores.
#
#   examples/train_embedded_model.sh CATALOGUE.tsv.gz WORK
#
# CATALOGUE lists labelled sequences and lies beside their FASTA files (see embedded_manifest.py); which
# of its groups were for training, validation and test stands in embedded_split.tsv. A run that was stopped
# goes on where it was. docs/MODEL_CARD.md says what came out.
set -euo pipefail

catalogue=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
python3 "$here/embedded_manifest.py" "$catalogue" > "$work/manifest.tsv"
common=(--data "$work/manifest.tsv" --split "$here/embedded_split.tsv" --seed 1 --device cpu --resume --quiet)

virnucpro train --pretrain "${common[@]}" --output-dir "$work/pretrained" \
    --layers 6 --dim 128 --heads 4 --epochs 2 --lr 1e-3

virnucpro train --finetune "${common[@]}" --output-dir "$work/finetuned" \
    --model "$work/pretrained/esm2_trained" --name esm2_virnucpro --workers 2 \
    --chunk-size 500 --chunk-size 300 --epochs 1 --lr 5e-4

virnucpro evaluate --data "$work/manifest.tsv" --split "$here/embedded_split.tsv" --part test \
    --model "$work/finetuned/esm2_virnucpro" --head "$work/finetuned/head.safetensors" \
    --output-dir "$work/evaluation" --device cpu --quiet
