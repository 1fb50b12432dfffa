"""Settings: every malformed configuration ends with exit code 2 and a short message, before anything is written."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from faults.tally import Tally
from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.cli.commands import main
from fedman.config import KEYS, Config, config_class
from tests.cli.conftest import furnish
from tests.cli.test_commands import BAD_KEYS, BAD_TOML

Words = list[str]
SECONDS = 20  # more than enough for a refusal, also on a busy machine
MEBIBYTES = 512  # what all refusals together may take
NO_SUCH_DEVICE = ["--device", "nowhere"]  # a configuration that passes is refused for this, and not trained

JUNK = ("abc", "nan", "[1]", "{}", "1e999", "--1", "0x1F", "½", "1 2", "None", "9" * 5000, "\x00", "\udcff", "true\n1")
ALL_KEYS = config_class(tuple(ALGORITHMS.values())).model_fields
HYPERPARAMETERS = [key for key in ALL_KEYS if key not in KEYS]
FREE = {"data_dir", "clip"}  # a path may be anything; clip may be infinite
UNBOUNDED = {"zeta", "lr", "weight_decay", "clip", "checkpoint_seconds", *HYPERPARAMETERS}


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Tables of the tests, and many more made from the list of keys."""
    furnish(scratch)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (4 << 30), limit[1]))  # the machine is not to suffer
    try:
        with contextlib.chdir(scratch):
            all_settings(tally, scratch, 25 if small else 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def address_space() -> int:
    """The bytes of address space this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def all_settings(tally: Tally, scratch: Path, every: int) -> None:
    """Every so-manyeth of all settings."""
    before = contents(scratch)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    groups = {
        "settings of the tests' table": [["run", *words] for words, _ in BAD_KEYS],
        "keys mistyped": list(mistyped()),
        "values of the wrong kind": list(wrong_kinds()),
        "values out of range": list(out_of_range()),
        "keys that contradict each other": list(contradictions()),
        "sweeps": list(sweeps()),
    }
    for what, cases in groups.items():
        for words in cases[::every]:
            tally.check(what, refused(words) or differs(before, scratch))
    for text in [*(t for t, _ in BAD_TOML), *files()][::every]:
        tally.check("configuration files", file_refused(text))
    for text in mutated(150 // every):
        tally.check("configuration files with damaged bytes", file_refused(text))
    for path in ("/dev/zero", "/dev/null/x", str(scratch)):
        tally.check("configuration files that are none", refused(["run", "--config", path]))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) >> 10
    tally.check("memory stays bounded", None if grown < MEBIBYTES else f"grew by {grown} MiB")
    tally.note("memory stays bounded", f"{grown} MiB for all settings together")


def mistyped() -> Iterator[Words]:
    for key in ALL_KEYS:
        for typo in (key[:-1], key + key[-1], key.upper(), key.replace("_", "-") + "-", f" {key}", f"{key}[0]"):
            if typo not in ALL_KEYS:
                yield ["run", f"{typo}=1", *NO_SUCH_DEVICE]


def wrong_kinds() -> Iterator[Words]:
    for key in ALL_KEYS:
        for value in JUNK:
            if key not in FREE:
                yield ["run", f"{key}={value}", *NO_SUCH_DEVICE]


def out_of_range() -> Iterator[Words]:
    for key, info in ALL_KEYS.items():
        if "float" in str(info.annotation) or "int" in str(info.annotation):
            for value in ("-1", "-1e-9", "-9" * 9, "-inf" if key in UNBOUNDED else "1e300"):
                yield ["run", *owner(key), f"{key}={value}", *NO_SUCH_DEVICE]


def owner(key: str) -> Words:
    """The choice of an algorithm that has a hyper-parameter."""
    return next(([f"algorithm={name}"] for name in ALGORITHMS if key in hyperparameters(ALGORITHMS[name])), [])


def contradictions() -> Iterator[Words]:
    for name in ALGORITHMS:
        for key in HYPERPARAMETERS:
            if key not in hyperparameters(ALGORITHMS[name]):
                yield ["run", f"algorithm={name}", f"{key}=0", *NO_SUCH_DEVICE]
    yield ["run", "man_variant=tiny-code", *NO_SUCH_DEVICE]
    yield ["run", "clients=1000000", "partition=iid"]
    yield ["run", "partition=path11"]
    yield ["run", "zeta=0.1", "zeta=0.1", *NO_SUCH_DEVICE]
    yield ["run", "--preset", "digits", "--preset", "none", *NO_SUCH_DEVICE]
    yield ["run", "augment=true", "clients=2", "dataset=npz:rows.npz"]


def sweeps() -> Iterator[Words]:
    for key in ALL_KEYS:
        if key not in FREE:
            yield ["sweep", f"{key}=\x00,\x01", *NO_SUCH_DEVICE]
    yield ["sweep", "seed=" + ",".join(map(str, range(100_000))), *NO_SUCH_DEVICE]
    yield ["sweep", *(f"{key}=1,2,3,4,5,6,7,8,9" for key in ("seed", "rounds", "epochs", "batch_size", "eval_every")),
           "zeta=0,1,2,3,4,5,6,7,8", *NO_SUCH_DEVICE]  # fmt: skip


def files() -> Iterator[str]:
    """Configuration files of the wrong type, shape or size."""
    for key in ALL_KEYS:
        yield f"{key} = []"
        yield f"{key} = 2020-01-01T00:00:00"
        yield f"{key}.a = 1"
    yield "zeta = " + "[" * 5000 + "]" * 5000
    yield "a" * 100_000 + " = 1"
    yield "rounds = " + "9" * 5000
    yield "".join(f"key{i} = 1\n" for i in range(20_000))
    yield "# " + "x" * (8 << 20)
    yield 'dataset = "npz:a\\u0000.npz"'
    yield 'dataset = "cifar100"\ndata_dir = "a\\u0000"'
    yield 'dataset = "\\u202e\\u001b[31m\\n\\nTraceback"'
    yield "epochs = 10000000\nclients = 2"


def mutated(count: int) -> Iterator[bytes]:
    """A good file with a few bytes changed: refused, or read as something else that is allowed."""
    good = "".join(f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}\n" for k, v in Config().flat().items())
    rng = random.Random(0)
    for _ in range(count):
        bad = bytearray(good.replace("'", '"').encode())
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        yield bytes(bad)


def file_refused(text: str | bytes) -> str | None:
    Path("bad.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    problem = refused(["run", "--config", "bad.toml", *NO_SUCH_DEVICE], may_pass=isinstance(text, bytes))
    return f"{text[:80]!r}: {problem}" if problem else None


def refused(words: Words, may_pass: bool = False) -> str | None:
    """None if the command ends with 2 and a short message; else what is wrong with its end."""
    out, err = io.StringIO(), io.StringIO()
    started = time.monotonic()
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(words)
    except SystemExit as stopped:
        code = stopped.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    said = err.getvalue()
    shown = f"{' '.join(words)[:100]!r}: exit {code}, {said[-200:]!r}"
    lines = said.rstrip("\n").split("\n")
    mistakes = lines[0].startswith("fedman: error: ") and (len(lines) == 1 or lines[0].endswith(" mistakes"))
    usage = lines[0].startswith("Usage: ")
    if code != 2 or out.getvalue() or "Traceback (most" in said or not (mistakes or usage):
        return shown
    if len(said) > 3000 or any((ord(c) < 32 and c != "\n") or c == "\x1b" for c in said if mistakes):
        return f"a long or unprintable message: {shown}"
    if not may_pass and "'nowhere'" in said:
        return f"was accepted: {shown}"
    return f"took {time.monotonic() - started:.0f} s: {shown}" if time.monotonic() - started > SECONDS else None


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def differs(before: list[Path], folder: Path) -> str | None:
    new = sorted(set(contents(folder)) - set(before))
    return f"something was written: {new[0]}" if new else None
