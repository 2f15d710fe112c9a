"""A published model is found in torch hub's folder, or downloaded, or refused with a remedy."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from select import select

import pytest
import torch
from conftest import random_esm2
from fair_esm_reference import make_fair_esm, save_contact_head, save_fair_esm
from http_server import Answer, answering, part, serving, whole
from malformed_inputs import Payload

from virnucpro.core.errors import OutputError, StorageError, UnavailableError, UsageError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.models import download as fetch
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import save_esm2
from virnucpro.models.esm2.model_files import ESM2Model, inspect_esm2, read_shape, require_esm2
from virnucpro.models.lookup import (
    embedded_model,
    fetch_contact_head,
    find_model,
    hub_folder,
    imported_folder,
    imported_names,
    open_model,
)
from virnucpro.models.manage import import_model, verify_model
from virnucpro.models.names import TINY_MODEL
from virnucpro.models.registry import FAMILIES, Published, RemoteFile

NAME = "esm2_t6_8M_UR50D"
PUBLISHED = FAMILIES["esm2"].published
NOWHERE = "http://127.0.0.1:1"
PARTIAL = f".{NAME}.pt.part"
SHAPE = ESM2Shape(n_layers=2, dim=160, n_heads=4)  # more than one block of the download


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("published") / "model.pt"
    return save_fair_esm(make_fair_esm(SHAPE), path).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with the same shape and other weights."""
    path = tmp_path_factory.mktemp("published") / "folder"
    save_esm2(path, random_esm2(SHAPE, seed=1))
    return path


@pytest.fixture(autouse=True)
def publish(tmp_path, monkeypatch, checkpoint, folder) -> Callable[..., None]:
    """Make a torch hub folder, and a small model under a published name, with these changes."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    figures = {
        "n_bytes": len(checkpoint),
        "max_bytes": 2 * len(checkpoint),
        "sha256": hashlib.sha256(checkpoint).hexdigest(),
    }

    def publish(**others: object) -> None:
        published = Published(
            n_layers=SHAPE.n_layers,
            dim=SHAPE.dim,
            n_heads=SHAPE.n_heads,
            files=(RemoteFile(url=f"{NOWHERE}/{NAME}.pt", **{**figures, **others}),),
            folder_sha256=inspect_esm2(folder).sha256(),
        )
        monkeypatch.setitem(PUBLISHED, NAME, published)

    publish()
    return publish


def find_checkpoint(
    name: str, on_event: EventHandler = lambda _: None, base_url: str = NOWHERE
) -> ESM2Model:
    """Return the ESM-2 with this name, downloaded from this address."""
    (file,) = PUBLISHED[NAME].files
    PUBLISHED[NAME] = replace(PUBLISHED[NAME], files=(replace(file, url=f"{base_url}/{NAME}.pt"),))
    return require_esm2(open_model(name, on_event))


def bring(path: Path, name: str) -> ESM2Model:
    """Import a model under a name."""
    model, digest = import_model(path, name)
    assert digest == require_esm2(model).sha256()
    return require_esm2(model)


def in_chunks(content: bytes, *, to_the_end: bool) -> Answer:
    """Send chunks without a total length. The last, empty one comes only if ``to_the_end``."""
    chunk = b"%x\r\n%b\r\n" % (len(content), content)
    return answering(chunk, b"0\r\n\r\n" * to_the_end, Transfer_Encoding="chunked")


def not_found(request: BaseHTTPRequestHandler) -> None:
    request.send_error(404)


def no_http(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")


def files() -> list[str]:
    return [path.name for path in hub_folder().iterdir()]


def refusal(base_url: str, kept: int = 0) -> UnavailableError:
    """Return the error, which names the address and the folder.

    The folder has no model, and only the bytes that came before the connection was lost.
    """
    with pytest.raises(UnavailableError) as caught:
        find_checkpoint(NAME, base_url=base_url)
    said = f"{caught.value}\n{caught.value.hint}"
    assert f"{base_url}/{NAME}.pt" in said
    assert str(hub_folder()) in said
    assert files() == ([PARTIAL] if kept else [])
    assert not kept or (hub_folder() / PARTIAL).stat().st_size == kept
    return caught.value


def test_missing_model_is_fetched_once(checkpoint, tmp_path):
    told: list[tuple[int, int]] = []

    def on_event(event: Progress) -> None:
        told.append((event.done, event.total))
        assert f"{NAME}.pt" not in files()

    with serving(whole(checkpoint)) as (base_url, asked):
        found = find_checkpoint(NAME, on_event, base_url)
    assert asked == [f"/models/{NAME}.pt"]
    assert found.path == tmp_path / "torch" / "hub" / "checkpoints" / f"{NAME}.pt"
    assert found.path.read_bytes() == checkpoint and found.shape == SHAPE
    assert files() == [f"{NAME}.pt"]
    assert len(told) > 1 and told == sorted(told)
    assert {total for _, total in told} == {told[-1][0]} == {len(checkpoint)}
    assert find_checkpoint(NAME, base_url=base_url) == found, "the server is gone"


def publish_contact_head(url: str) -> str:
    """Publish a contact head for the small model, and return its file name."""
    head = RemoteFile(url=f"{url}/{NAME}-contact-regression.pt", max_bytes=100_000)
    PUBLISHED[NAME] = replace(PUBLISHED[NAME], contact_head=head)
    return head.name


def test_contact_head_is_fetched_once_and_lies_next_to_the_model(checkpoint, tmp_path):
    with serving(whole(checkpoint)) as (url, _):
        model = find_checkpoint(NAME, base_url=url)
    assert "contacts" not in model.includes
    save_contact_head(make_fair_esm(SHAPE), tmp_path / "head.pt")
    with serving(whole((tmp_path / "head.pt").read_bytes())) as (url, asked):
        name = publish_contact_head(url)
        fetch_contact_head(NAME, model, lambda _: None)
        complete = inspect_esm2(model.path)
        assert "contacts" in complete.includes
        fetch_contact_head(NAME, complete, lambda _: None)
    assert asked == [f"/models/{name}"]
    assert sorted(files()) == sorted([f"{NAME}.pt", name])


def test_other_file_is_no_contact_head(checkpoint):
    with serving(whole(checkpoint)) as (url, _):
        model = find_checkpoint(NAME, base_url=url)
    with serving(whole(b"<html>log in</html>")) as (url, _):
        publish_contact_head(url)
        with pytest.raises(UnavailableError):
            fetch_contact_head(NAME, model, lambda _: None)
    assert files() == [f"{NAME}.pt"]


def test_missing_contact_head_is_answered_with_its_download(checkpoint):
    with serving(whole(checkpoint)) as (url, _):
        model = find_checkpoint(NAME, base_url=url)
    assert f"`virnucpro models download {NAME}`" in model.explain_missing("contacts")


def test_server_without_length_is_read_to_the_end(checkpoint, publish):
    publish(n_bytes=None)
    told: list[tuple[int, int]] = []
    with serving(in_chunks(checkpoint, to_the_end=True)) as (base_url, _):
        found = find_checkpoint(NAME, lambda one: told.append((one.done, one.total)), base_url)
    assert found.path.read_bytes() == checkpoint
    assert told[-1] == (len(checkpoint), 0)


@pytest.mark.parametrize("name", [NAME, TINY_MODEL, "ours"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_local_file_is_no_named_model(tmp_path, monkeypatch, by_file, name, kind):
    bring(by_file["file"], "ours")
    before = find_model(name)
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree if kind == "folder" else shutil.copyfile
    copy(by_file[kind], tmp_path / name)
    assert find_model(name) == before
    assert find_model(f"./{name}") == tmp_path / name
    for place in (imported_folder() / TINY_MODEL, imported_folder() / f"{TINY_MODEL}.pt"):
        shutil.copytree(by_file["folder"], place)
    assert find_model(TINY_MODEL) == embedded_model()


def test_path_with_separator_is_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = replace(SHAPE, dim=64)
    for path in (tmp_path / "model.pt", tmp_path / NAME):
        save_fair_esm(make_fair_esm(shape), path)
        for shown in (f"./{path.name}", str(path), f"../{tmp_path.name}/{path.name}"):
            assert find_checkpoint(shown, base_url="http://127.0.0.1:1").shape == shape
    with pytest.raises(UnavailableError, match=r"no model named model\.pt") as caught:
        find_checkpoint("model.pt")
    assert caught.value.hint == "if you mean model.pt in the current folder, write ./model.pt"


def test_unknown_name_is_answered_with_all_names():
    with pytest.raises(UnavailableError, match="no model named prot_t5") as caught:
        find_checkpoint("prot_t5")
    assert all(name in caught.value.hint for name in (TINY_MODEL, *PUBLISHED))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("esm2_t33_650M", "esm2_t33_650M_UR50D"),
        ("650m", "esm2_t33_650M_UR50D"),
        ("esm2_t6_8M_UR50", "esm2_t6_8M_UR50D"),
        ("ESM2_T6_8M_UR50D", "esm2_t6_8M_UR50D"),
        ("esm2_t36_3B_UR50D.pt", "esm2_t36_3B_UR50D"),
        ("facebook/esm2_t12_35M_UR50D", "esm2_t12_35M_UR50D"),
        ("esm2_virnucpo", TINY_MODEL),
        ("our", "ours"),
    ],
)
def test_misspelt_name_is_answered_with_the_right_one(by_file, given, meant):
    bring(by_file["file"], "ours")
    with pytest.raises(UnavailableError) as caught:
        find_checkpoint(given)
    assert caught.value.hint.startswith(f"did you mean {meant}?")


PAGE = b"<!DOCTYPE html><title>Please log in</title>"


@pytest.mark.parametrize(
    ("answer", "said", "kept"),
    [
        (lambda content: part(content, 2_000_000), "after 2000000 of {} bytes", 2_000_000),
        (lambda content: in_chunks(content, to_the_end=False), "", None),
        (lambda content: part(content + b"more", 0), "bytes, not {}", 0),
        (lambda _: not_found, "Not Found", 0),
        (lambda _: no_http, "SSH-2.0", 0),
        (lambda _: whole(PAGE), f"it has {len(PAGE)} bytes, not", 0),
    ],
    ids=["early end", "early end of chunks", "another length", "nothing", "no HTTP", "a page"],
)
def test_partial_file_is_refused_and_kept(checkpoint, answer, said, kept):
    n_bytes = len(checkpoint)
    with serving(answer(checkpoint)) as (base_url, _):
        error = refusal(base_url, n_bytes if kept is None else kept)
    assert said.format(n_bytes) in str(error)


def test_complete_download_is_not_requested_again(checkpoint):
    begin(checkpoint)
    with serving(not_found) as (base_url, asked):
        assert find_checkpoint(NAME, base_url=base_url).path.read_bytes() == checkpoint
    assert not asked


def test_error_without_server_names_the_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        assert "refused" in str(refusal(f"http://127.0.0.1:{taken.getsockname()[1]}"))


def test_other_model_without_hash_is_refused(tmp_path, publish):
    other = save_fair_esm(make_fair_esm(replace(SHAPE, n_layers=1)), tmp_path / "other.pt")
    publish(n_bytes=None, sha256="")
    with (
        serving(whole(other.read_bytes())) as (base_url, _),
        pytest.raises(UnavailableError, match="it has 1 layers, 160 dimensions") as caught,
    ):
        find_checkpoint(NAME, base_url=base_url)
    assert "delete it to fetch it again" in caught.value.hint


@pytest.mark.parametrize("n_bytes", [None, "the same"])
@pytest.mark.parametrize("hash_name", ["sha256", "md5"])
def test_other_weights_of_the_same_shape_are_refused(
    tmp_path, checkpoint, publish, n_bytes, hash_name
):
    other = save_fair_esm(make_fair_esm(SHAPE, seed=1), tmp_path / "other.pt").read_bytes()
    figures = {"sha256": "", "md5": "", hash_name: hashlib.new(hash_name, checkpoint).hexdigest()}
    publish(n_bytes=n_bytes and len(other), **figures)
    with serving(whole(other)) as (base_url, _):
        said = str(refusal(base_url))
    assert f"is not {NAME}" in said and hash_name.upper().replace("SHA", "SHA-") in said
    with serving(whole(checkpoint)) as (base_url, _):
        publish(n_bytes=n_bytes and len(checkpoint), **figures)
        assert find_checkpoint(NAME, base_url=base_url).path.read_bytes() == checkpoint


@pytest.mark.parametrize("said", ["many", "-5", "1e9", "9" * 5000, ""])
def test_length_that_is_no_number_is_ignored(checkpoint, said):
    with serving(answering(checkpoint, Content_Length=said)) as (base_url, _):
        assert find_checkpoint(NAME, base_url=base_url).path.read_bytes() == checkpoint


@pytest.mark.parametrize("is_recorded", [True, False])
def test_endless_answer_is_refused(checkpoint, publish, is_recorded):
    publish(n_bytes=len(checkpoint) if is_recorded else None)
    sent = []

    def endless(request: BaseHTTPRequestHandler) -> None:
        in_chunks(checkpoint, to_the_end=False)(request)
        while True:
            sent.append(len(checkpoint))
            request.wfile.write(b"%x\r\n%b\r\n" % (len(checkpoint), checkpoint))

    with serving(endless) as (base_url, _):
        assert "is longer than" in str(refusal(base_url))
    assert sum(sent) < 100 * len(checkpoint)


def test_trickling_answer_is_given_up(checkpoint, monkeypatch):
    """Each byte comes well within the time limit for a silent connection."""
    monkeypatch.setattr(fetch, "_TIMEOUT", 1.0)

    def trickling(request: BaseHTTPRequestHandler) -> None:
        part(checkpoint, 0)(request)
        with suppress(OSError):  # it is hung up on, which can be read
            for place in range(len(checkpoint)):
                request.wfile.write(checkpoint[place : place + 1])
                if any(select([request.connection], [], [], 0.05)):
                    return

    with serving(trickling) as (base_url, _), pytest.raises(UnavailableError, match="too slow"):
        find_checkpoint(NAME, base_url=base_url)


@pytest.mark.parametrize("how", ["longer", "other weights"])
def test_published_name_needs_published_file(tmp_path, checkpoint, how):
    """Whether the file comes from torch hub, a colleague, or an older version of ours."""
    path = hub_folder() / f"{NAME}.pt"
    path.parent.mkdir(parents=True)
    other = save_fair_esm(make_fair_esm(SHAPE, seed=1), tmp_path / "other.pt").read_bytes()
    path.write_bytes(checkpoint + b"more" if how == "longer" else other)
    with pytest.raises(UnavailableError, match=f"is not the published {NAME}") as caught:
        verify_model(NAME)
    assert "models import" in caught.value.hint
    if how == "longer":  # seen without reading it
        with pytest.raises(UnavailableError, match="bytes, not"):
            find_checkpoint(NAME)
    path.write_bytes(checkpoint)
    assert verify_model(NAME)[0].path == path


def ranges(content: bytes, starts: list[str | None]) -> Answer:
    """A server that sends the requested part, and records the range of each request."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers["Range"]
        starts.append(wanted)
        if not wanted:
            return whole(content)(request)
        first = int(wanted.removeprefix("bytes=").removesuffix("-"))
        place = f"bytes {first}-{len(content) - 1}/{len(content)}"
        rest = content[first:]
        answer = answering(rest, status=206, Content_Range=place, Content_Length=len(rest))
        return answer(request)

    return answer


def test_interrupted_download_continues(checkpoint):
    def stop(event: Progress) -> None:
        raise KeyboardInterrupt

    with serving(whole(checkpoint)) as (base_url, _), pytest.raises(KeyboardInterrupt):
        find_checkpoint(NAME, stop, base_url)
    n_bytes = (hub_folder() / PARTIAL).stat().st_size
    assert files() == [PARTIAL] and 0 < n_bytes < len(checkpoint)
    starts: list[str | None] = []
    told: list[tuple[int, int]] = []
    with serving(ranges(checkpoint, starts)) as (base_url, _):
        found = find_checkpoint(NAME, lambda one: told.append((one.done, one.total)), base_url)
    assert starts == [f"bytes={n_bytes}-"]
    assert told[0][0] > n_bytes and told[-1] == (len(checkpoint), len(checkpoint))
    assert found.path.read_bytes() == checkpoint and files() == [f"{NAME}.pt"]


def begin(content: bytes) -> None:
    """Leave the result of an earlier, interrupted download."""
    hub_folder().mkdir(parents=True, exist_ok=True)
    (hub_folder() / PARTIAL).write_bytes(content)


ANOTHER_RANGE = answering(
    b"abc", status=206, Content_Range=f"bytes {'9' * 5_000}-1/*", Content_Length=3
)


def nothing_behind(request: BaseHTTPRequestHandler) -> None:
    request.send_error(416)


@pytest.mark.parametrize(
    ("beginning", "answer", "kept"),
    [
        (1000, lambda _: whole(PAGE), 1000),
        (1000, lambda _: ANOTHER_RANGE, 1000),
        (0, lambda content: ranges(content, []), 0),
        (None, lambda _: nothing_behind, 0),
    ],
    ids=["a page to log in", "another range", "of another file", "as long as the file"],
)
def test_partial_download_is_kept_unless_wrong(checkpoint, publish, beginning, answer, kept):
    """A length that was never published may be right: the server has nothing after it."""
    if beginning is None:
        publish(n_bytes=None)
    begin(checkpoint[:beginning] or bytes(1000))
    with serving(answer(checkpoint)) as (base_url, _):
        refusal(base_url, kept)
    with serving(whole(checkpoint)) as (base_url, _):  # it knows no ranges, and sends all of it
        assert find_checkpoint(NAME, base_url=base_url).path.read_bytes() == checkpoint


def test_file_fetched_by_another_is_left(checkpoint):
    hub_folder().mkdir(parents=True)
    with (hub_folder() / PARTIAL).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            serving(whole(checkpoint)) as (base_url, asked),
            pytest.raises(OutputError, match="another process is downloading"),
        ):
            find_checkpoint(NAME, base_url=base_url)
    assert not asked and files() == [PARTIAL]


def foreign_file(path: Path) -> Path:
    """A user's file outside the model folder."""
    path.write_bytes(b"mine")
    return path


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe"])
def test_download_is_not_written_through_a_link(checkpoint, tmp_path, kind):
    mine = foreign_file(tmp_path / "mine")
    partial = hub_folder() / PARTIAL
    hub_folder().mkdir(parents=True)
    match kind:
        case "link":
            partial.symlink_to(mine)
        case "dangling link":
            partial.symlink_to(tmp_path / "nothing")
        case "hard link":
            partial.hardlink_to(mine)
        case "pipe":
            os.mkfifo(partial)
    with serving(whole(checkpoint)) as (url, _), pytest.raises(OutputError) as caught:
        find_checkpoint(NAME, base_url=url)
    assert PARTIAL in str(caught.value) and "delete it" in caught.value.hint
    assert mine.read_bytes() == b"mine" and not (tmp_path / "nothing").exists()
    assert not (hub_folder() / f"{NAME}.pt").exists()
    partial.unlink()
    with serving(whole(checkpoint)) as (url, _):
        assert find_checkpoint(NAME, base_url=url).path.read_bytes() == checkpoint


def test_exchanged_download_is_not_put_in_place(checkpoint, tmp_path):
    mine = foreign_file(tmp_path / "mine")
    partial = hub_folder() / PARTIAL

    def exchange(event: object) -> None:
        if isinstance(event, Progress) and event.done == len(checkpoint):
            partial.unlink()
            partial.symlink_to(mine)

    with serving(whole(checkpoint)) as (url, _), pytest.raises(OutputError) as caught:
        find_checkpoint(NAME, exchange, url)
    assert PARTIAL in str(caught.value)
    assert mine.read_bytes() == b"mine" and not (hub_folder() / f"{NAME}.pt").exists()


def test_disk_space_is_checked_first(checkpoint, publish):
    publish(n_bytes=10**18)
    with (
        serving(whole(checkpoint)) as (base_url, asked),
        pytest.raises(StorageError, match="the download needs") as caught,
    ):
        find_checkpoint(NAME, base_url=base_url)
    assert not asked and not files() and "TORCH_HOME" in caught.value.hint


def test_unwritable_folder_is_no_network_fault(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "file"))
    with (
        serving(whole(checkpoint)) as (base_url, asked),
        pytest.raises(OutputError, match="file/hub/checkpoints: Not a directory"),
    ):
        find_checkpoint(NAME, base_url=base_url)
    assert not asked


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_name_tells_the_size(name, monkeypatch):
    monkeypatch.undo()
    _, layers, size, _ = name.split("_")
    published = PUBLISHED[name]
    (file,) = PUBLISHED[name].files
    shape = read_shape(published)
    assert layers == f"t{shape.n_layers}"
    millions = float(size[:-1]) * {"M": 1, "B": 1000}[size[-1]]
    # names are rounded to one or two digits, which 7.4 million as 8M takes furthest
    assert shape.n_parameters / 1e6 == pytest.approx(millions, rel=0.1)
    assert file.url == f"https://dl.fbaipublicfiles.com/fair-esm/models/{name}.pt"
    assert {len(file.sha256), len(file.md5)} in ({64, 0}, {0, 32})
    if file.n_bytes is not None:
        # float32 or, for 3B, float16; the heads and the names of the tensors are few per cent
        bytes_each = 2 if "3B" in name else 4
        assert file.n_bytes == pytest.approx(bytes_each * shape.n_parameters, rel=0.02)


# Imported files


@pytest.fixture
def by_file(tmp_path, checkpoint, folder):
    """The two checkpoints with one shape and different weights, as files of a user."""
    brought = tmp_path / "brought"
    brought.mkdir()
    (brought / "mine.pt").write_bytes(checkpoint)
    shutil.copytree(folder, brought / "yours")
    (brought / "yours" / "pytorch_model.bin").write_bytes(b"may carry code")
    return {"file": brought / "mine.pt", "folder": brought / "yours"}


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", [NAME, "my.model-1"])
def test_imported_model_is_found_by_name(by_file, kind, name):
    source = inspect_esm2(by_file[kind])
    digest = source.sha256()
    imported = bring(source.path, name)
    assert bring(source.path, name).path == imported.path
    shutil.rmtree(source.path.parent)
    found = find_checkpoint(name)
    assert (found.path, found.sha256()) == (imported.path, digest)
    assert (found.name, found.encoder_id) == (name, source.encoder_id)
    assert (name in imported_names()) == (name != NAME)
    assert not [path for path in found.path.parent.rglob("*") if path.suffix in (".tmp", ".bin")]


def test_other_model_of_that_name_is_refused(by_file):
    before = bring(by_file["file"], "ours")
    with pytest.raises(OutputError, match="another model already has the name ours") as caught:
        bring(by_file["folder"], "ours")
    assert "delete that one first" in caught.value.hint
    assert find_checkpoint("ours") == before
    before.path.unlink()
    imported = bring(by_file["folder"], "ours")
    assert imported.sha256() == inspect_esm2(by_file["folder"]).sha256()
    assert find_checkpoint("ours") == imported
    (imported_folder() / "notes.txt").touch()
    assert imported_names() == ["ours"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", "-rf", ".hidden", "x.pt", "esm2_virnucpro"])
def test_impossible_name_is_refused(by_file, name):
    with pytest.raises(UsageError, match="cannot be the name"):
        bring(by_file["file"], name)


@pytest.mark.parametrize(
    ("kind", "shape"), [("file", SHAPE), ("folder", SHAPE), ("file", replace(SHAPE, n_layers=1))]
)
def test_other_weights_get_no_published_name(tmp_path, kind, shape):
    other = tmp_path / "other"
    if kind == "file":
        save_fair_esm(make_fair_esm(shape, seed=1), other)
    else:
        save_esm2(other, random_esm2(shape, seed=2))
    with pytest.raises(UnavailableError, match=f"is not the published {NAME}") as caught:
        bring(other, NAME)
    assert "--name NAME" in caught.value.hint
    assert not hub_folder().exists() and not imported_folder().exists()
    bring(other, "ours")


def test_file_with_code_is_not_imported(tmp_path):
    torch.save({"model": {"x": Payload(tmp_path / "ran")}}, tmp_path / "bad.pt")
    with pytest.raises(UnavailableError, match="contains more than tensors"):
        bring(tmp_path / "bad.pt", "bad")
    assert not (tmp_path / "ran").exists()
    assert imported_names() == []
