"""Calls from a user's program, which mypy checks strictly. Nothing here is run.

An ``ignore`` that hides no error is an error. So each one here marks an error that a caller would
see.
"""

from __future__ import annotations

import virnucpro


def show(progress: virnucpro.Progress) -> None:
    assert progress.done / progress.total <= 1, (progress.stage, progress.unit)


def take(score: float | None, ends: list[int]) -> None:
    assert score is None or ends


def calls() -> None:
    for call in virnucpro.predict("in.fa", on_progress=show, min_length=5, head="h"):
        take(call.virus_score, [region.end for region in call.regions])
        take(call.record_id, [])  # type: ignore[arg-type]
    virnucpro.predict({"a": "ACGT"}, add=True, resume=True, output_dir="run")
    virnucpro.predict(input=["a.fa", "b.fa"])
    ids, vectors = virnucpro.embed(["MKV", "MST"], on_error="skip")
    take(float(vectors.mean()), [len(ids)])
    found = virnucpro.embed({"p1": "MKV"})
    take(None, [len(found.statuses["p1"])])
    with virnucpro.extract("in.faa", layer=6, pooling="mean", store="bfloat16") as result:
        for name, vector in result:
            take(float(vector[0]), [len(name)])
        take(None, [record.n_embedded for record in result.records()])
        take(result.ids, [])  # type: ignore[arg-type]
    several = virnucpro.extract(
        "in.faa", layers=[6, "-1"], pooling=["mean", "std"], include="logits"
    )
    for name, rows in several.read(several.outputs[1]):
        take(float(rows[0]), [len(name)])
    virnucpro.extract("in.faa", include="attention")  # type: ignore[arg-type]
    virnucpro.embed("MKV", on_error="ignore")  # type: ignore[arg-type]
    virnucpro.extract("in.fa", threshold=0.5)  # type: ignore[call-arg]
    virnucpro.predict("in.fa", min_lenght=500)  # type: ignore[call-arg]
    virnucpro.predict("in.fa", preset="strict")  # type: ignore[arg-type]
    virnucpro.embed("in.faa", layer="last", workers=2)  # type: ignore[arg-type]
    virnucpro.embed("in.faa", output_dir="out")  # type: ignore[call-arg]
