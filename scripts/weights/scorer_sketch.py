"""Write the sketch of the scorer's training data, virnucpro/embedded/trained.safetensors.

    python scripts/weights/scorer_sketch.py manifest.tsv genes.tsv trained.safetensors

The manifests are those of ``train_embedded_scorer.py``. The built-in scorer must have the digest
of each of their records.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

from safetensors.numpy import save_file

from virnucpro.core.errors import InputError
from virnucpro.sequences.kmers import Sketch
from virnucpro.training.labelled_data import read_data_manifest, read_records
from virnucpro.viral.networks import Scorer


def main(manifest: Path, genes: Path, out: Path) -> None:
    scorer = Scorer.load_builtin()
    trained = frozenset(scorer.trained_records.tolist())
    sketches = []
    manifests = (read_records(read_data_manifest(path)) for path in (manifest, genes))
    for labelled, record in chain.from_iterable(manifests):
        if labelled.digest not in trained:
            raise InputError(f"{labelled.id}: the scorer was not trained on this record")
        sketches.append(Sketch.from_sequences(record.sequence))
    metadata = {"scorer_sha256": scorer.sha256}
    save_file({"trained_kmers": Sketch.merge(sketches).pack()}, out, metadata)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))
