"""Malformed inputs that git cannot store, or that are large. Each is made on demand.

``outcomes.tsv`` names them as ``made:`` and their name here. A maker gets an empty folder, and
returns what the user would name with ``--input``.
"""

from __future__ import annotations

import gzip
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

DNA = "ATGGCAGCAGCTGCTGGTGCAGCTGCAGGAGCTGCTGCAGGTGCAGCTGCT"
CLOSED = "TAAATAAATAACTTAATTAGTTAGCTAGCTAACTAGTCATCACTATTA"  # a stop in every frame
TWO = f">a first\n{DNA}\n>b\n{DNA[3:]}\n"
_BLOCK = 1 << 20


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


Maker = Callable[[Path], list[Path]]
# folder files by name, made on demand because some are large
Files = Callable[[], dict[str, str | bytes]]


def two_records() -> dict[str, str | bytes]:
    return {"in.fa": TWO}


NAMED: dict[str, Files] = {  # the user names each file
    "a_line_of_5_million_bases": lambda: {"in.fa": f">long\n{CLOSED * 104_167}\n>last\n{DNA}\n"},
    "many_records_of_10_bases": lambda: {
        "in.fa": "".join(f">r{i}\nNNNNNNNNNN\n" for i in range(100_000))
    },
    "many_empty_records": lambda: {"in.fa": "".join(f">r{i}\n" for i in range(20_000))},
    "a_protein_of_100_000_residues": lambda: {
        "in.faa": f">long\n{'MKVLEFPQIL' * 10_000}\n>short\nMKVLEFPQIL\n"
    },
    "ids_of_10_kilobytes": lambda: {
        "in.fa": "".join(f">{'x' * 10_000}{i} of a test\n{DNA}\n" for i in (1, 2))
    },
    "a_description_of_a_megabyte": lambda: {"in.fa": f">a {'x' * 1_000_000}\n{DNA}\n>b\n{DNA}\n"},
    "a_header_without_end": lambda: {  # 4 GB when unpacked
        "in.fa.gz": gzip.compress(b">") + 256 * gzip.compress(b"x" * (16 * _BLOCK))
    },
    "a_protein_without_end": lambda: {"in.faa.gz": endless_protein()},
    "duplicates_across_files": lambda: {"first.fa": TWO, "second.fa": f">a again\n{DNA}\n"},
    "nucleotides_and_proteins_in_two_files": lambda: {
        "first.fa": TWO,
        "proteins.faa": ">p\nMKVLEFPQILAAGG\n",
    },
    # while the run goes on it gets other letters, as many as before
    "a_file_to_be_rewritten": two_records,
    # while the run goes on it gets another record
    "a_file_to_be_added_to": two_records,
    "a_name_like_an_option": lambda: {"-rf.fa": TWO},
    "a_name_with_newline_and_escapes": lambda: {"a\nb\x1b[31m\u202e[red]c.fa": TWO},
    "a_bad_file_with_newline_and_escapes": lambda: {"a\nb\x1b[31mc.fa": "no FASTA"},
    "a_name_that_is_not_utf8": lambda: {os.fsdecode(b"caf\xe9.fa"): TWO},
}
INSIDE: dict[str, Files] = {  # the user names the folder
    "a_folder_without_fasta": lambda: {"notes.txt": TWO},
    "a_folder_of_folders": lambda: {"sample.fa/in.fa": TWO},
    "an_empty_folder": dict,
    "a_folder_of_two": lambda: {
        "1.fa": f">a\n{DNA}\n",
        "2.fna": f">b\n{DNA}\n",
        ".3.fa": f">hidden\n{DNA}\n",
    },
}


def endless_protein() -> bytes:
    """Make a protein far above the test's limit. The last of its many lines has no end."""
    lines = gzip.compress(b"MKVLEFPQIL\n" * _BLOCK) + gzip.compress(b"MKVLEFPQIL" * _BLOCK)
    return gzip.compress(b">first\nMKV\n>endless\n") + 16 * lines


def write(folder: Path, files: Files) -> list[Path]:
    paths = []
    for name, content in files().items():
        paths.append(folder / name)
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_bytes(content if isinstance(content, bytes) else content.encode())
    return paths


def no_permission(folder: Path) -> list[Path]:
    (path,) = write(folder, two_records)
    path.chmod(0)
    return [path]


def a_fifo(folder: Path, mode: int = 0o600) -> list[Path]:
    os.mkfifo(folder / "pipe", mode)
    return [folder / "pipe"]


def a_dangling_link(folder: Path) -> list[Path]:
    (folder / "in.fa").symlink_to("nowhere.fa")
    return [folder / "in.fa"]


def a_loop_of_links(folder: Path) -> list[Path]:
    (folder / "in.fa").symlink_to("back.fa")
    (folder / "back.fa").symlink_to("in.fa")
    return [folder / "in.fa"]


def a_socket(folder: Path) -> list[Path]:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(folder)  # the name of a socket must be short
        listening.bind("socket.fa")
        os.chdir(here)
    return [folder / "socket.fa"]


def inside(folder: Path, make: Maker) -> list[Path]:
    make(folder)
    return [folder]


MAKERS: dict[str, Maker] = {
    **{name: partial(write, files=of) for name, of in NAMED.items()},
    **{name: partial(inside, make=partial(write, files=of)) for name, of in INSIDE.items()},
    "a_file_without_permission_in_a_folder": partial(inside, make=no_permission),
    "a_dangling_link_in_a_folder": partial(inside, make=a_dangling_link),
    "a_loop_of_links_in_a_folder": partial(inside, make=a_loop_of_links),
    "the_same_file_twice": lambda folder: 2 * write(folder, two_records),
    "no_permission": no_permission,
    "a_fifo": a_fifo,
    "a_pipe_without_permission": partial(a_fifo, mode=0),
    "a_dangling_link": a_dangling_link,
    "a_loop_of_links": a_loop_of_links,
    "nothing_there": lambda folder: [folder / "nothing.fa"],
    "a_name_of_300_letters": lambda folder: [folder / ("x" * 300)],
    "a_socket": a_socket,
    "dev_null": lambda _: [Path(os.devnull)],
    "control_characters_through_standard_input": lambda _: [Path("-")],
}


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Write two records into a pipe during the block."""

    def write() -> None:
        with suppress(BrokenPipeError):
            path.write_text(TWO)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # wakes a process that still waits
        thread.join(timeout=10)
