"""`fedman data get`: download the official archives, resume interrupted transfers, verify checksums.

A file is downloaded as NAME.part and renamed once its checksum is right, so a file under its own name is complete. Who
comes while another process downloads it waits for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedman.data.catalog import Progress, Spec, default_dir, is_path, lookup
from fedman.errors import UserError, one_line

TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 18
MAX_BYTES = 2 << 30  # several times the largest official archive


def get(
    name: str, data_dir: Path | str | None = None, *, url: str | None = None, progress: Progress | None = None
) -> list[Path]:
    """Download what `load(name, data_dir)` reads; files that exist are only checked.

    `url` is another address: of one official archive, or, ending in "/", of a folder with the official files.
    """
    if is_path(name):
        raise UserError(f"dataset: {name} is a file of your own; there is nothing to download")
    spec = lookup(name)
    if not spec.files:
        return []
    wanted = _addresses(spec, url or spec.url)
    folder = (Path(data_dir).expanduser() if data_dir else default_dir()) / spec.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_one(address, folder, md5, progress) for address, md5 in wanted.items()]
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from error


def _addresses(spec: Spec, url: str) -> dict[str, str]:
    """Address -> MD5 of each file to fetch."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"url: {url} is not allowed; it must begin with http:// or https://")
    if url.endswith("/"):
        return {url + name: md5 for name, md5 in spec.files.items()}
    known = {**spec.files, **spec.also}
    name = _name(url)
    if len(spec.files) > 1 or name not in known:
        raise UserError(f"url: {url} is not allowed; it must end in {' or '.join(['/', *known])}")
    return {url: known[name]}


def _name(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])


def _one(url: str, folder: Path, md5: str, progress: Progress | None) -> Path:
    path, part = folder / _name(url), folder / f"{_name(url)}.part"
    if not path.exists():
        with _alone(part, progress):
            if not path.exists():  # nobody else has downloaded it in the meantime
                _fetch(url, part, progress)
                if (found := _md5(part)) != md5:
                    part.unlink()
                    raise UserError(f"{url}: wrong checksum, md5 {found} instead of {md5}; the file was removed")
                part.replace(path)
                return path
    if (found := _md5(path)) != md5:
        raise UserError(f"{path}: is there already but is not the official file (md5 {found}, not {md5})")
    return path


@contextmanager
def _alone(part: Path, progress: Progress | None) -> Iterator[None]:
    """Wait until no other process writes to `part`. It then exists; if it is empty in the end, it is removed."""
    while True:
        with open(part, "ab") as file:
            _lock(file, part.stem, progress)
            try:
                mine = os.path.samestat(part.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                mine = False
            if not mine:
                continue  # it was another's, who has renamed or removed it
            try:
                yield
            finally:
                if part.exists() and not part.stat().st_size:
                    part.unlink()
            return


def _lock(file: BinaryIO, name: str, progress: Progress | None) -> None:
    with suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress(f"{name}: another process downloads it", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    """Download `url` to `part`, or the rest of it if `part` has bytes."""
    have = part.stat().st_size
    resume = f"{part} is kept, run the same command again to resume"
    try:
        response = _open(url, have)
        if response is None:
            return
        with response:
            if response.status != http.client.PARTIAL_CONTENT:
                have = 0
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else 0
            done = _copy(url, response, part, have, total, progress)
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}: the server answers {error.code} {one_line(error.reason)}") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = one_line(getattr(error, "reason", "") or error) or type(error).__name__
        kept = f"; {resume}" if part.stat().st_size else ""
        raise UserError(f"{url}: the transfer failed ({reason}){kept}") from error
    if done < total:
        raise UserError(f"{url}: the transfer stopped after {done} of {total} bytes; {resume}")


def _open(url: str, have: int) -> http.client.HTTPResponse | None:
    """The response, from byte `have` on (206) or from the start (200); None if there is nothing beyond `have`."""
    request = urllib.request.Request(url, headers={"User-Agent": "fedman", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if have and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None
        raise
    start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if response.status == http.client.PARTIAL_CONTENT and (not start or int(start[1]) != have):
        response.close()
        return _open(url, 0)
    return response


def _copy(
    url: str, response: http.client.HTTPResponse, part: Path, have: int, total: int, progress: Progress | None
) -> int:
    """Write the response to `part` from byte `have` on; return the length of `part`."""
    with open(part, "ab" if have else "wb") as file:
        while block := response.read(BLOCK):
            have += len(block)
            if have > MAX_BYTES:
                part.unlink()
                raise UserError(f"{url}: sends more than {MAX_BYTES} bytes; no official archive is that large")
            file.write(block)
            if progress:
                progress(_name(url), have, total)
        file.flush()
        os.fsync(file.fileno())
    return have
