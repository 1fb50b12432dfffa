"""What a person does in the first hour with fedman, as thirty actions; writes docs/first-hour.md.

    make first-hour      # in a fresh environment: the wheel and its dependencies, nothing else

Every action is a command in an empty folder. It must end with the exit code given here, say the words given here, and
show no traceback.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/first-hour.md"
LIMIT = 600  # seconds
SMALL = "dataset=digits clients=6 participation=0.5 epochs=1 batch_size=20"

OWN = """
from dataclasses import dataclass
from torch import nn
import fedman

@dataclass(frozen=True)
class Half(fedman.Algorithm):
    title = "Half"
    share: float = fedman.hyperparameter(0.5, "of the way", maximum=1.0)

    def step(self, w, grad, server, client, hp):
        return fedman.descend(w, grad(w), hp)

    def update(self, server, mean, fraction):
        return {"w": server["w"] + self.share * (mean["w"] - server["w"])}

def narrow(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
"""
LOOP = """
import torch
from fedman import ActivationNorm
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
man = ActivationNorm(model)
loss = model(torch.ones(3, 4)).sum() + 0.15 * man()
loss.backward()
print(sorted(man.values))
"""
CALL = f"""
import fedman

def enough(record):
    if record["round"] == 2:
        raise fedman.StopRun("seen enough")

keys = dict(word.split("=") for word in "{SMALL}".split())
result = fedman.run(**keys, rounds=9, progress=enough)
result.plot("curves.png")
print(result)
"""
ARRAYS = """
import numpy as np
x = np.random.default_rng(0).normal(size=(90, 4))
np.savez("mine.npz", x=x, y=(x[:, 0] > 0).astype(int))
"""


@dataclass(frozen=True)
class Action:
    """A command of the shell, its exit code and what it must say; `quick` needs no torch."""

    kind: str
    what: str
    command: str
    says: str
    code: int = 0
    quick: bool = False


ACTIONS = (
    Action("install", "which version is this?", "fedman --version", r"fedman \d+\.\d+", quick=True),
    Action("install", "what can it do?", "fedman --help", "Usage: fedman", quick=True),
    Action(
        "install",
        "without the command on the path",
        "python -m fedman --version && python -m fedman.cli --version",
        r"fedman \d",
        quick=True,
    ),
    Action(
        "install",
        "completion of the shell",
        "bash -c 'fedman --show-completion && true'",
        "_fedman_completion",
        quick=True,
    ),
    Action("install", "in Python", "python -c 'import fedman; print(fedman.list_algorithms()[:2])'", "fedavg"),
    Action("read", "names and keys", "fedman list", "zeta .*weight of the penalty", quick=True),
    Action("read", "the options of a command", "fedman run -h", "--resume", quick=True),
    Action("read", "who holds which samples", f"fedman data show {SMALL}", "client"),
    Action("run", "a run", f"fedman run {SMALL} rounds=3 zeta=0.05 --out runs/a", "written to runs/a"),
    Action("run", "the same command again", f"fedman run {SMALL} rounds=3 zeta=0.05 --out runs/a", "runs/a", 2),
    Action("run", "two rounds more", "fedman run --out runs/a --resume rounds=5", "written to runs/a"),
    Action("run", "a grid", f"fedman sweep {SMALL} zeta=0,0.05 seed=0,1 rounds=2 --out runs/grid", "gain"),
    Action(
        "run", "the grid again", f"fedman sweep {SMALL} zeta=0,0.05 seed=0,1 rounds=2 --out runs/grid", "4 of 4 runs"
    ),
    Action(
        "run",
        "a grid in shares, as an array of jobs runs it",
        f"for i in 1 2 3; do fedman sweep {SMALL} zeta=0,0.05 rounds=1 --shard $i/3 --out part-$i; done; "
        "fedman sweep --merge part-* --out parts",
        "2 runs in parts, 2 of them finished",
    ),
    Action("run", "in one call, with a callback that stops it, and a picture", "python call.py", "FedAvg on digits"),
    Action(
        "run",
        "killed in the middle",
        f"fedman run {SMALL} rounds=99999 --out runs/b & until [ -s runs/b/rounds.jsonl ]; do sleep 0.2; done; "
        "kill $!; wait $!",
        "go on with: fedman run --out runs/b --resume",
        143,
    ),
    Action("break", "another library's word", "fedman run criterion=mse", "fedman's is task", 2, True),
    Action("break", "a slip", "fedman run algorithm=fedavgg", "did you mean fedavg", 2, True),
    Action("break", "a key as an option", "fedman run --rounds 3", "write rounds=VALUE", 2, True),
    Action("break", "a device that is not there", f"fedman run {SMALL} --device mps --out runs/x", "use cpu", 2),
    Action(
        "break", "data that is not there", "fedman run dataset=cifar10 data_dir=nowhere", "fedman data get cifar10", 2
    ),
    Action("break", "an extra that is not installed", f"fedman flower simulate {SMALL} --out runs/f", "pip install", 2),
    Action(
        "break", "a folder that cannot be written", f"fedman run {SMALL} rounds=1 --out /proc/runs", "/proc/runs", 2
    ),
    Action(
        "break",
        "a damaged file",
        "truncate -s -9 runs/grid/*seed1/summary.json && fedman verify runs/grid",
        "damaged",
        2,
    ),
    Action(
        "extend", "an algorithm of your own", f"fedman run {SMALL} algorithm=own:Half share=0.7 rounds=2", "^Half: "
    ),
    Action("extend", "a model with too few outputs", f"fedman run {SMALL} model=own:narrow", "10 classes need 10", 2),
    Action(
        "extend",
        "arrays of your own",
        "python arrays.py && fedman run dataset=npz:mine.npz clients=4 rounds=2",
        "written",
    ),
    Action("measure", "MAN in a loop of your own", "python loop.py", "output"),
    Action("measure", "how flat it is", "fedman flatness runs/a --top 2 --trace", r"\.png"),
    Action("measure", "a page of the runs", "fedman report runs/a --out page.html", "page.html"),
)
HEAD = f"""# The first hour

Thirty actions of a new user, in an environment that holds only fedman's wheel and its dependencies.
`make first-hour` runs them and writes this page. It fails if an action ends with another exit code, does not print what
it should, or ends in a traceback. `SMALL` stands for `{SMALL}`.

| | what | command | exit code | seen |
| --- | --- | --- | --- | --- |
"""
WIDTH = 300  # of what is seen


def play(action: Action, folder: Path, python: Path) -> tuple[str, str]:
    """What an action printed, and what is wrong with that: nothing, if all is well."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} if python != Path(sys.executable) else os.environ
    environment = {**clean, "PATH": path, "COLUMNS": "120", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        action.command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    printed = done.stdout + done.stderr
    wrong = [f"exit code {done.returncode}, not {action.code}"] * (done.returncode != action.code)
    wrong += [f"does not say {action.says!r}"] * (not re.search(action.says, printed, re.MULTILINE))
    wrong += ["a traceback"] * ("Traceback (most recent" in printed)
    return printed, "; ".join(wrong)


def prepare(folder: Path) -> None:
    """The files that the actions use."""
    for name, text in {"own.py": OWN, "loop.py": LOOP, "call.py": CALL, "arrays.py": ARRAYS}.items():
        (folder / name).write_text(text, encoding="utf-8")


def row(action: Action) -> str:
    """An action in the table, but for what was seen."""
    return f"| {action.kind} | {action.what} | `{action.command.replace(SMALL, 'SMALL')}` | {action.code} | "


def seen(action: Action, printed: str) -> str:
    """The line that says what the action must say."""
    line = next((line for line in printed.splitlines() if re.search(action.says, line)), "")
    return " ".join(re.sub("[|`│]", " ", line).split())[:WIDTH]


def main() -> int:
    python = Path(sys.argv[1] if len(sys.argv) > 1 else sys.executable).absolute()
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for i, action in enumerate(ACTIONS, 1):
            started = time.monotonic()
            printed, wrong = play(action, folder, python)
            print(f"{i:2} {time.monotonic() - started:5.1f} s  {action.command}  {wrong or 'as expected'}", flush=True)
            rows.append(f"{row(action)}`{seen(action, printed)}` |\n")
            if wrong:
                failed += 1
                print(printed)
    if not failed:
        PAGE.write_text(HEAD + "".join(rows), encoding="utf-8")
    print(f"{len(ACTIONS) - failed} of {len(ACTIONS)} as expected")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
