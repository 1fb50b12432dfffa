"""The version of the program that a result names."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path


def release() -> str:
    """The package's version."""
    try:
        return metadata.version("fedman")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


@cache
def version() -> str:
    """The package's version and a hash of its source, so that a result names the code that made it."""
    source = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{release()}{'.' if '+' in release() else '+'}{source.hexdigest()[:12]}"
