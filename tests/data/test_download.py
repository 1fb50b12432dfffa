"""`fedman data get` against an HTTP server on loopback that misbehaves in many ways."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedman.data import catalog, download
from fedman.errors import UserError

CONTENT = np.random.default_rng(0).bytes(1_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
OFFICIAL = catalog.SPECS["cifar100"]
NAME = "cifar-100-binary.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        given = self.headers.get("Range")
        server.ranges.append(given)
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", content.decode())
            return self.end_headers()
        start = int(given.removeprefix("bytes=").rstrip("-")) if given and server.resumes else 0
        if start >= len(content) > 0:
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start + server.shift}-{len(content) - 1}/{len(content)}")
        if server.length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start : server.cut] if server.cut else content[start:]
        for half in (body[: len(body) // 2], body[len(body) // 2 :]):
            self.wfile.write(half)
            self.wfile.flush()
            time.sleep(server.pause)
        time.sleep(server.stall)

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Serves `files`; `cut` ends every answer at that byte, `stall` keeps the line open after it. A `pause`
    follows each half."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {f"/{NAME}": CONTENT}
        self.ranges: list[str | None] = []
        self.cut: int | None = None
        self.stall = self.pause = 0.0
        self.shift = 0
        self.resumes = self.length = True

    def url(self, path: str = NAME) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server; CONTENT is the official archive."""
    monkeypatch.setitem(catalog.SPECS, "cifar100", replace(OFFICIAL, files={NAME: MD5}))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def get(server: Server, folder: Path, **options: object) -> list[Path]:
    return download.get("cifar100", folder, **({"url": server.url()} | options))


def fails(says: str, server: Server, folder: Path, **options: object) -> str:
    with pytest.raises(UserError, match=says) as error:
        get(server, folder, **options)
    message = str(error.value)
    assert "\n" not in message
    assert not (folder / NAME).exists()
    return message


def test_downloads_and_verifies(server: Server, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    (path,) = get(server, tmp_path / "new", progress=lambda *call: calls.append(call))
    assert path == tmp_path / "new" / NAME
    assert path.read_bytes() == CONTENT
    assert calls[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert [p.name for p in path.parent.iterdir()] == [NAME]


def test_a_file_that_is_there_is_checked_not_fetched(server: Server, tmp_path: Path) -> None:
    get(server, tmp_path)
    get(server, tmp_path)
    assert len(server.ranges) == 1
    (tmp_path / NAME).write_bytes(b"mine")
    with pytest.raises(UserError, match="is there already but is not the official file"):
        get(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"mine"
    assert len(server.ranges) == 1


def test_cut_off_then_resumed(server: Server, tmp_path: Path) -> None:
    server.cut = 600_000
    message = fails("stopped after 600000 of 1000000 bytes", server, tmp_path)
    assert f"{NAME}.part is kept" in message
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:600_000]
    server.cut = None
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=600000-"]


def test_resume_where_the_server_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1234])
    server.resumes = False
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == ["bytes=1234-"]


def test_resume_where_the_server_answers_another_range(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1234])
    server.shift = 7
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == ["bytes=1234-", None]


def test_part_that_is_complete(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"x" * 10, CONTENT[:-1] + b"x", CONTENT + b"x"])
def test_part_of_something_else_is_removed(server: Server, tmp_path: Path, part: bytes) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(part)
    fails("wrong checksum", server, tmp_path)
    assert not list(tmp_path.iterdir())
    get(server, tmp_path)


def test_wrong_checksum_names_both_and_removes(server: Server, tmp_path: Path) -> None:
    server.files = {f"/{NAME}": b"other"}
    message = fails("wrong checksum", server, tmp_path)
    assert hashlib.md5(b"other").hexdigest() in message
    assert MD5 in message
    assert not list(tmp_path.iterdir())


def test_published_md5_is_used(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.SPECS, "cifar100", OFFICIAL)
    assert "03b5dce01913d631647c71ecec9e9cb8" in fails("wrong checksum", server, tmp_path)


def test_no_length_given(server: Server, tmp_path: Path) -> None:
    server.length = False
    totals: list[int] = []
    get(server, tmp_path, progress=lambda what, done, total: totals.append(total))
    assert set(totals) == {0}


def test_two_at_once(server: Server, tmp_path: Path) -> None:
    """The second waits for the first, and says so."""
    server.pause = 0.3
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(get, server, tmp_path, progress=lambda what, *_: said.append(what)) for _ in range(2)]
    assert [each.result() for each in both] == [[tmp_path / NAME]] * 2
    assert len(server.ranges) == 1
    assert f"{NAME}: another process downloads it" in said
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_the_second_downloads_what_the_first_could_not(server: Server, tmp_path: Path) -> None:
    server.pause, server.files = 0.3, {f"/{NAME}": CONTENT[::-1]}
    part = tmp_path / f"{NAME}.part"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(get, server, tmp_path)
        while not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        server.files = {f"/{NAME}": CONTENT}
        second = pool.submit(get, server, tmp_path)
    with pytest.raises(UserError, match="wrong checksum"):
        first.result()
    assert second.result()[0].read_bytes() == CONTENT


def test_not_found(server: Server, tmp_path: Path) -> None:
    message = fails("404", server, tmp_path, url=server.url(f"elsewhere/{NAME}"))
    assert server.url(f"elsewhere/{NAME}") in message
    assert not list(tmp_path.iterdir())


def test_not_found_keeps_the_part(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:10])
    fails("404", server, tmp_path, url=server.url(f"elsewhere/{NAME}"))
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:10]


def test_nobody_listens(server: Server, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/{NAME}"
        fails("the transfer failed", server, tmp_path, url=url)


def test_silence(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.cut, server.stall = 600_000, 60.0
    with monkeypatch.context() as impatient:
        impatient.setattr(download, "TIMEOUT", 3.0)  # time for a busy machine to send what there is
        fails("timed out", server, tmp_path)
    kept = (tmp_path / f"{NAME}.part").read_bytes()
    assert CONTENT.startswith(kept)
    server.cut, server.stall = None, 0.0
    get(server, tmp_path)


def test_not_http(server: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].sendall(b"220 ftp ready\r\n"), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/{NAME}"
        fails("the transfer failed", server, tmp_path, url=url)


def test_endless_answer(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", 500_000)
    fails("more than 500000 bytes", server, tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_space_left(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").symlink_to("/dev/full")
    fails("No space left", server, tmp_path)


def test_folder_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        get(server, tmp_path / "file/folder")
    assert server.ranges == []


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        ("cifar100", {"url": "file:///etc/passwd"}, "must begin with http"),
        ("cifar100", {"url": "ftp://host/cifar-100-binary.tar.gz"}, "must begin with http"),
        ("cifar100", {"url": "cifar-100-binary.tar.gz"}, "must begin with http"),
        ("cifar100", {"url": "http://127.0.0.1/other.zip"}, "must end in / or cifar-100-binary.tar.gz"),
        ("cifar100", {"url": "http://127.0.0.1/..%2Fother.zip"}, "must end in"),
        ("mnist", {"url": "http://127.0.0.1/train-images-idx3-ubyte.gz"}, "must end in /"),
        ("npz:mine.npz", {}, "nothing to download"),
        ("cifar101", {}, "did you mean"),
    ],
)
def test_refused_before_the_network_is_used(tmp_path: Path, dataset: str, options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        download.get(dataset, tmp_path, **options)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_digits_need_no_download(tmp_path: Path) -> None:
    assert download.get("digits", tmp_path) == []


def test_four_files_from_a_mirror(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder address; each file has its own checksum; they go where the loader and torchvision look."""
    spec = catalog.SPECS["mnist"]
    contents = {name: name.encode() * 100 for name in spec.files}
    sums = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setitem(catalog.SPECS, "mnist", replace(spec, files=sums))
    server.files = {f"/mirror/{name}": content for name, content in contents.items()}
    paths = download.get("mnist", tmp_path, url=server.url("mirror/"))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [f"MNIST/raw/{name}" for name in contents]
    assert [path.read_bytes() for path in paths] == list(contents.values())
