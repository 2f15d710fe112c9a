"""Scripts that train the shipped weights (``scripts/weights``), and the examples."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from runpy import run_path

import numpy as np
import pytest
from labelled_data_helpers import write_labelled
from measure_cascade import EMBEDDED_SHARES, cascade_curve, cross_validated_scores, measure

import virnucpro
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path
    for folder in ("examples", "scripts/weights")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "\nif __name__ ==" in path.read_text(encoding="utf-8")
]


def random_bases(random: Random, n_bases: int) -> str:
    return "".join(random.choices("ACGT", k=n_bases))


def back_translated(random: Random, residues: str) -> str:
    codons: dict[str, list[str]] = {}
    for codon, residue in STANDARD.meanings.items():
        codons.setdefault(residue, []).append(codon)
    return "".join(random.choice(codons[residue]) for residue in residues)


def test_transposable_elements_in_eukaryotes(tmp_path):
    pytest.importorskip("pyhmmer", reason="the script searches with pyhmmer")
    script = ROOT / "scripts/weights/scorer_elements.py"
    random = Random(1)
    seeds = run_path(str(script))["SEEDS"]
    line = reverse_complement(back_translated(random, seeds["LINE"]))
    mariner = back_translated(random, seeds["mariner"])
    animal = random_bases(random, 4000) + line + random_bases(random, 5000) + mariner
    (tmp_path / "a.fa").write_text(f">animal\n{animal}\n>bacterium\n{mariner}\n")
    (tmp_path / "manifest.tsv").write_text(
        "path\tid\tlabel\tgroup\tkingdom\n"
        "a.fa\tanimal\tother\tgenus Mus\tanimals\na.fa\tbacterium\tother\tfamily B\tbacteria\n"
    )
    command = [sys.executable, script, tmp_path / "manifest.tsv", tmp_path / "elements.fa"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = list(csv.DictReader(table.splitlines(), delimiter="\t"))
    records = {record.id: record for record in read_fasta(tmp_path / "elements.fa")}
    assert [row["id"] for row in rows] == list(records)
    kinds = []
    for row, element in zip(rows, (line, mariner), strict=True):
        place = animal.index(element)
        name = row["id"]
        start, end = map(int, name.removeprefix("animal:").split("-"))
        assert start <= place - 1000 and min(len(animal), place + len(element) + 1000) <= end
        assert end - start < len(element) + 4000
        assert records[name].sequence == animal[start:end]
        kinds.append(records[name].header.split()[1])
        assert (row["path"], row["label"]) == (str(tmp_path / "elements.fa"), "other")
        assert (row["group"], row["kingdom"]) == ("genus Mus", "transposable elements")
    assert kinds == ["LINE", "mariner"]


def test_cascade_loses_only_unread_calls():
    is_virus = np.repeat([True, False], 100)
    second = np.where(is_virus, 1.0, -1.0) + np.linspace(-0.4, 0.4, 200)
    first = second.copy()
    first[:10] = -9  # viruses that the second reader calls, and the first takes for cells
    rows = cascade_curve(first, second, is_virus)
    assert [row[0] for row in rows] == list(EMBEDDED_SHARES)
    for share, cells, viruses, called, lost in rows[:-1]:
        assert cells == pytest.approx(share, abs=0.011)
        assert (viruses, called, lost) == pytest.approx((0.9, 0.9, 0.1))
    assert rows[-1] == (1.0, 1.0, 1.0, 1.0, 0.0)
    inputs = np.random.default_rng(1).normal(size=(200, 3))
    changed = is_virus ^ (np.arange(200) % 10 == 4)
    scores = [
        cross_validated_scores(inputs, labels, np.arange(200) % 10)
        for labels in (is_virus, changed)
    ]
    is_same = scores[0] == scores[1]
    assert is_same[4::10].all() and not np.delete(is_same, np.s_[4::10]).any()


def test_cascade_on_other_kingdoms_or_none(tmp_path, capsys):
    data = write_labelled(tmp_path)
    measure(data, 300, 20)
    output = capsys.readouterr().out
    assert [line.split("%")[0] for line in output.splitlines()[1:]] == [
        f"{100 * share:.1f}" for share in EMBEDDED_SHARES
    ]
    data.write_text(re.sub("(virus|other) kingdom", "", data.read_text()))
    measure(data, 300, 20)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(EMBEDDED_SHARES)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_script_shows_its_usage(script, tmp_path, monkeypatch, capsys):
    for package in ("pyhmmer", "pyrodigal", "taxoniq"):
        if f"import {package}\n" in script.read_text(encoding="utf-8"):
            pytest.importorskip(package, reason=f"the script needs {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        run_path(str(script), run_name="__main__")
    said = f"{ended.value} {capsys.readouterr().out}"
    assert f"python {script.relative_to(ROOT)}" in said or "usage: " in said
    assert not list(tmp_path.iterdir())


def test_weight_scripts_are_not_installed():
    scripts = {path.stem for path in (ROOT / "scripts/weights").glob("*.py")}
    package = Path(virnucpro.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    assert {"numpy", "torch", "virnucpro"} <= imported and not scripts & imported
    assert not (package / "scripts").exists()
