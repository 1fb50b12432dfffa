"""The version of the program that a result names, and the commit that explains it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from fedman.runs.records import Source

ROOT = Path(__file__).parent.parent
ARCHIVED = Path(__file__).with_name("commit.txt")  # `git archive` puts the commit in it (.gitattributes)
UNRELEASED = "0+source"


def release() -> str:
    """The package's version."""
    try:
        return metadata.version("fedman")
    except metadata.PackageNotFoundError:  # run from a source tree
        return UNRELEASED


@cache
def version() -> str:
    """The package's version and a hash of its source, so that a result names the code that made it."""
    source = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        source.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return f"{release()}{'.' if '+' in release() else '+'}{source.hexdigest()[:12]}"


@cache
def source() -> Source:
    """Where this code can be found again: a commit, a release, or why neither is known."""
    archived = ARCHIVED.read_text(encoding="ascii").strip() if ARCHIVED.exists() else ""
    if re.fullmatch(r"[0-9a-f]{40,64}", archived):
        return {"commit": archived}
    try:
        if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # no checkout, or one of something else
            return _installed() or {"unknown": "neither a checkout nor installed"}
        commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    except OSError as error:
        return _installed() or {"unknown": f"git cannot be run: {error.strerror or error}"}
    except subprocess.TimeoutExpired:
        return {"unknown": "git did not answer"}
    if commit is None or changes is None:
        return {"unknown": "git does not know the commit"}
    return {"commit": commit, "changed": bool(changes)}


def _installed() -> Source | None:
    """What pip noted of the package: a release, or the commit that it was installed from (PEP 610); None where this is
    not the package that is installed, but lies beside notes of one that is installed for editing."""
    try:
        found = metadata.distribution("fedman")
    except metadata.PackageNotFoundError:
        return None
    if Path(str(found.locate_file("fedman"))).resolve() != ROOT.resolve() or found.read_text("RECORD") is None:
        return None
    if (origin := found.read_text("direct_url.json")) is None:
        return {"release": found.version}
    commit = json.loads(origin).get("vcs_info", {}).get("commit_id")
    return {"commit": commit} if commit else {"unknown": "installed from a folder or a file"}


def _git(*arguments: str) -> str | None:
    """What git says of the package's folder, without writing to the checkout; None where it fails."""
    words = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(ROOT), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20, stdin=subprocess.DEVNULL)
    return done.stdout.strip() if done.returncode == 0 else None
