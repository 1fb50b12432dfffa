"""`make faults`: break things on purpose and count what held.

    python -m faults [SECTION ...]

prints a table (what, tried, held, failed) and one line of JSON; exits with 1 if anything failed.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from faults.tally import Row, Tally

SECTIONS = (
    *("kill", "disk", "many", "finished", "symlinks", "settings", "files", "injection", "numerics", "determinism"),
    *("supply", "mutation", "replies", "nodes", "orphans"),
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        print(f"faults: no section {unknown[0]!r}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the processes started here would ignore it
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for name in names or SECTIONS:
        started = time.monotonic()
        rows += section(name)
        seconds[name] = round(time.monotonic() - started, 1)
        print(f"{name}: {seconds[name]} s", file=sys.stderr, flush=True)
    print(table(rows))
    for row in rows:
        for failure in row.failures:
            print(f"failed: {row.section}: {row.what}: {failure}")
    print(json.dumps({"faults": [asdict(row) for row in rows], "seconds": seconds}, ensure_ascii=False))
    return int(any(row.failures for row in rows))


def section(name: str, small: bool = False) -> list[Row]:
    """Run one section in a folder of its own."""
    tally = Tally(name)
    with tempfile.TemporaryDirectory(prefix=f"fedman-{name}-") as scratch:
        try:
            importlib.import_module(f"faults.{name}").run(tally, Path(scratch), small)
        except Exception as error:
            traceback.print_exc()
            tally.check("the section itself", f"{type(error).__name__}: {error}")
    return list(tally.rows.values())


def table(rows: list[Row]) -> str:
    """The rows for a person."""
    lines = [("section", "what", "tried", "held", "failed", "note")]
    lines += [(r.section, r.what, str(r.tried), str(r.held), str(r.tried - r.held), r.note) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    sides = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust)
    aligned = [[side(*cell) for side, *cell in zip(sides, line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in aligned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
