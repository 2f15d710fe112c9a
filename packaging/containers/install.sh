#!/bin/sh
# Install VirNucPro of the current folder, with the tested versions, and try it.
#
#   sh packaging/containers/install.sh FOLDER TORCH
#
# FOLDER becomes a virtual environment. TORCH is a build of PyTorch's own index (cpu, cu128, ...),
# or `default` for that of the package index.
set -eu
folder=$1
torch=$2
python=${PYTHON:-python3}

"$python" -m venv "$folder"
if [ "$torch" != default ]; then
    "$folder/bin/pip" install --no-cache-dir --no-deps -c constraints.txt \
        --index-url "https://download.pytorch.org/whl/$torch" torch
fi
"$folder/bin/pip" install --no-cache-dir -c constraints.txt .

results=$(mktemp -d)
"$folder/bin/virnucpro" predict --quiet --input examples/contigs.fa --output-dir "$results/run"
test "$(grep -c . "$results/run/viruses.tsv")" = 9
rm -rf "$results"
