"""Hostile inputs that git cannot keep, or that are large: each is made when a test asks for it.

``outcomes.tsv`` names them as ``made:`` and the function's name. A function is given an empty
folder, and returns what the user would name with ``--input``.
"""

from __future__ import annotations

import gzip
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DNA = "ATGGCAGCAGCTGCTGGTGCAGCTGCAGGAGCTGCTGCAGGTGCAGCTGCT"
CLOSED = "TAAATAAATAACTTAATTAGTTAGCTAGCTAACTAGTCATCACTATTA"  # a stop in every frame
TWO = f">a first\n{DNA}\n>b\n{DNA[3:]}\n"
_BLOCK = 1 << 20


class Payload:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


Maker = Callable[[Path], list[Path]]
MAKERS: dict[str, Maker] = {}


def made(maker: Maker) -> Maker:
    MAKERS[maker.__name__] = maker
    return maker


@made
def a_line_of_5_million_bases(folder: Path) -> list[Path]:
    return [_write(folder / "in.fa", f">long\n{CLOSED * 104_167}\n>last\n{DNA}\n")]


@made
def many_records_of_10_bases(folder: Path) -> list[Path]:
    return [_write(folder / "in.fa", "".join(f">r{i}\nNNNNNNNNNN\n" for i in range(100_000)))]


@made
def many_empty_records(folder: Path) -> list[Path]:
    return [_write(folder / "in.fa", "".join(f">r{i}\n" for i in range(20_000)))]


@made
def a_protein_of_100_000_residues(folder: Path) -> list[Path]:
    return [_write(folder / "in.faa", f">long\n{'MKVLEFPQIL' * 10_000}\n>short\nMKVLEFPQIL\n")]


@made
def ids_of_10_kilobytes(folder: Path) -> list[Path]:
    names = ("x" * 10_000 + "1", "x" * 10_000 + "2")
    return [_write(folder / "in.fa", "".join(f">{name} of a test\n{DNA}\n" for name in names))]


@made
def a_description_of_a_megabyte(folder: Path) -> list[Path]:
    return [_write(folder / "in.fa", f">a {'x' * 1_000_000}\n{DNA}\n>b\n{DNA}\n")]


@made
def a_header_without_end(folder: Path) -> list[Path]:
    """4 GB when unpacked."""
    member = gzip.compress(b"x" * (16 * _BLOCK))
    return [_write(folder / "in.fa.gz", gzip.compress(b">") + 256 * member)]


@made
def a_protein_without_end(folder: Path) -> list[Path]:
    """Far more letters than the test's bound; the last of many lines has no end either."""
    lines = gzip.compress(b"MKVLEFPQIL\n" * _BLOCK) + gzip.compress(b"MKVLEFPQIL" * _BLOCK)
    return [_write(folder / "in.faa.gz", gzip.compress(b">first\nMKV\n>endless\n") + 16 * lines)]


@made
def duplicates_across_files(folder: Path) -> list[Path]:
    second = _write(folder / "second.fa", f">a again\n{DNA}\n")
    return [_write(folder / "first.fa", TWO), second]


@made
def nucleotides_and_proteins_in_two_files(folder: Path) -> list[Path]:
    proteins = _write(folder / "proteins.faa", ">p\nMKVLEFPQILAAGG\n")
    return [_write(folder / "first.fa", TWO), proteins]


@made
def the_same_file_twice(folder: Path) -> list[Path]:
    return 2 * [_write(folder / "in.fa", TWO)]


@made
def a_file_to_be_rewritten(folder: Path) -> list[Path]:
    """While the run goes on it gets other letters, as many as before."""
    return [_write(folder / "in.fa", TWO)]


@made
def a_file_to_be_added_to(folder: Path) -> list[Path]:
    """While the run goes on it gets another record."""
    return [_write(folder / "in.fa", TWO)]


@made
def a_folder_without_fasta(folder: Path) -> list[Path]:
    _write(folder / "notes.txt", TWO)
    return [folder]


@made
def a_folder_of_folders(folder: Path) -> list[Path]:
    (folder / "sample.fa").mkdir()
    _write(folder / "sample.fa" / "in.fa", TWO)
    return [folder]


@made
def an_empty_folder(folder: Path) -> list[Path]:
    return [folder]


@made
def a_folder_of_two(folder: Path) -> list[Path]:
    _write(folder / "1.fa", f">a\n{DNA}\n")
    _write(folder / "2.fna", f">b\n{DNA}\n")
    _write(folder / ".3.fa", f">hidden\n{DNA}\n")
    return [folder]


@made
def no_permission(folder: Path) -> list[Path]:
    path = _write(folder / "in.fa", TWO)
    path.chmod(0)
    return [path]


@made
def a_pipe_without_permission(folder: Path) -> list[Path]:
    os.mkfifo(folder / "pipe", mode=0)
    return [folder / "pipe"]


@made
def a_file_without_permission_in_a_folder(folder: Path) -> list[Path]:
    no_permission(folder)
    return [folder]


@made
def a_dangling_link(folder: Path) -> list[Path]:
    (folder / "in.fa").symlink_to("nowhere.fa")
    return [folder / "in.fa"]


@made
def a_dangling_link_in_a_folder(folder: Path) -> list[Path]:
    a_dangling_link(folder)
    return [folder]


@made
def a_loop_of_links(folder: Path) -> list[Path]:
    (folder / "in.fa").symlink_to("back.fa")
    (folder / "back.fa").symlink_to("in.fa")
    return [folder / "in.fa"]


@made
def a_loop_of_links_in_a_folder(folder: Path) -> list[Path]:
    a_loop_of_links(folder)
    return [folder]


@made
def nothing_there(folder: Path) -> list[Path]:
    return [folder / "nothing.fa"]


@made
def a_name_of_300_letters(folder: Path) -> list[Path]:
    return [folder / ("x" * 300)]


@made
def a_socket(folder: Path) -> list[Path]:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(folder)  # the name of a socket must be short
        listening.bind("socket.fa")
        os.chdir(here)
    return [folder / "socket.fa"]


@made
def dev_null(folder: Path) -> list[Path]:
    return [Path(os.devnull)]


@made
def a_name_like_an_option(folder: Path) -> list[Path]:
    return [_write(folder / "-rf.fa", TWO)]


@made
def a_name_with_newline_and_escapes(folder: Path) -> list[Path]:
    return [_write(folder / "a\nb\x1b[31m\u202e[red]c.fa", TWO)]


@made
def a_bad_file_with_newline_and_escapes(folder: Path) -> list[Path]:
    return [_write(folder / "a\nb\x1b[31mc.fa", "no FASTA")]


@made
def a_name_that_is_not_utf8(folder: Path) -> list[Path]:
    return [_write(folder / os.fsdecode(b"caf\xe9.fa"), TWO)]


@made
def a_fifo(folder: Path) -> list[Path]:
    os.mkfifo(folder / "pipe")
    return [folder / "pipe"]


@made
def control_characters_through_standard_input(folder: Path) -> list[Path]:
    return [Path("-")]


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Somebody writes two records into a pipe, for the time of the block."""

    def write() -> None:
        with suppress(BrokenPipeError):
            path.write_text(TWO)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # wakes who still waits
        thread.join(timeout=10)


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
