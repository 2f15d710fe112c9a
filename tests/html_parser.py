"""Reports for tests: parse their data and text, and write tables to report on."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from virnucpro.results.call_rows import record_rows
from virnucpro.results.outputs import RunOutput
from virnucpro.viral.types import Call, Calls

EVIL = "<img/src=x/onerror=document.title='bad'>"
EXAMPLE = Path(__file__).parents[1] / "examples" / "contigs.fa"


class Page(HTMLParser):
    """The parsed page: its elements, text and title."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.title = ""
        self._open = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self._open == "title" and not self.title:
            self.title = data
        if self._open not in ("script", "style"):
            self.text += data

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())

    @property
    def data(self) -> Any:
        (packed,) = re.findall(r'type="application/octet-stream">([^<]*)<', self.source)
        return json.loads(zlib.decompress(base64.b64decode(packed)))

    @property
    def ids(self) -> list[str]:
        """The ids in the table of records."""
        return self.data["columns"]["record"].split("\n")


def write_table(folder: Path, calls: Iterable[Call], **facts: object) -> Path:
    """Write a run folder with a table of these calls and a ``run.json`` with these facts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RunOutput.RECORD_TABLE.file).open("w", encoding="utf-8", newline="\n") as out:
        out.write("\t".join(RunOutput.RECORD_TABLE.columns) + "\n")
        out.write(record_rows(Calls.from_calls(calls)).decode("utf-8", "surrogateescape"))
    content = {"state": "complete", "recipe": {"command": "predict"}, **facts}
    (folder / "run.json").write_text(json.dumps(content))
    return folder


def call(name: str, score: float, length: int = 700, **more: Any) -> Call:
    """Make a scored record that is viral from 0.9 on."""
    return Call(
        name,
        length,
        "scored",
        more.pop("sample", "contigs"),
        virus_score=score,
        is_virus=score >= 0.9,
        **more,
    )
