"""Parts of a user: found by name, as module:Name, by an entry point, as an instance; and all that can be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

import fedman
from fedman.algorithms import ALGORITHMS, Algorithm, hyperparameter
from fedman.algorithms.fedavg import FedAvg
from fedman.config import PARTS, registered, resolve
from fedman.errors import UserError
from fedman.optimizers import OPTIMIZERS, SGD
from fedman.parts import Registry, announced, hyperparameters
from fedman.penalties import PENALTIES
from fedman.runs import sweep
from fedman.runs.build import stack_key
from fedman.runs.folder import RunFolder
from fedman.runs.grid import cells
from fedman.tasks import TASKS
from fedman.training.check_parts import can_be_stacked, check_algorithm, check_optimizer

NAMES = {
    "task": ["classification", "regression", "multi-label", "language-model"],
    "penalty": ["man", "man-hidden", "man-logits", "activation-l1", "feddecorr"],
    "optimizer": ["sgd", "adam", "adamw"],
    "aggregation": ["mean", "median", "trimmed-mean", "krum", "multi-krum", "norm-clip"],
    "attack": ["none", "sign-flip", "scaled", "label-flip", "collusion"],
    "algorithm": [
        *("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed", "fedprox", "scaffold", "fedavgm", "fedadam"),
        *("fedcm", "mofedsam", "fedgamma", "fedsmoo", "fedlesam", "fedlesam-d", "fedacg", "fedgloss"),
    ],
}


def test_built_in_parts_by_name():
    assert {kind: list(registry) for kind, registry in PARTS.items()} == NAMES
    for kind, registry in PARTS.items():
        assert len(registry) == len(NAMES[kind])
        for name, part in registry.items():
            assert issubclass(part, registry.base)
            assert registry.name_of(part()) == name
            assert registry.check(part, name) is part


def test_groups_of_entry_points():
    groups = [each.group for each in (ALGORITHMS, TASKS, PENALTIES, OPTIMIZERS)]
    assert groups == ["fedman.algorithms", "fedman.tasks", "fedman.penalties", "fedman.optimizers"]


@dataclass(frozen=True)
class Own(FedAvg):
    """An algorithm of this module."""

    title = "Own"
    beta: float = hyperparameter(0.5, "β", maximum=1.0)

    @dataclass(frozen=True)
    class Inner(FedAvg):
        title = "Inner"


def test_module_and_name():
    assert ALGORITHMS["tests.test_parts:Own"] is Own
    assert ALGORITHMS["tests.test_parts:Own.Inner"] is Own.Inner
    assert "tests.test_parts:Own" not in ALGORITHMS  # nobody lists it
    config = resolve({"algorithm": "tests.test_parts:Own", "beta": "0.25"})
    assert config.make_algorithm() == Own(beta=0.25)
    assert config.method == "Own"


def test_an_instance_of_a_local_class():
    """As in a notebook: nothing can be imported, and the name leads to the class all the same."""

    @dataclass(frozen=True)
    class Here(FedAvg):
        title = "Here"
        beta: float = hyperparameter(0.5, "β")

    name = ALGORITHMS.name_of(Here(beta=2.0))
    assert name == "tests.test_parts:test_an_instance_of_a_local_class.<locals>.Here"
    assert resolve({"algorithm": name, "beta": 2.0}).make_algorithm() == Here(beta=2.0)
    with pytest.raises(UserError, match=r"^algorithm: SGD is not a subclass of fedman\.algorithms\.Algorithm$"):
        ALGORITHMS.name_of(SGD())


MAIN = """
from dataclasses import dataclass
from fedman.algorithms import ALGORITHMS
from fedman.algorithms.fedavg import FedAvg
from fedman.config import resolve

@dataclass(frozen=True)
class Mine(FedAvg):
    title = "Mine"

name = ALGORITHMS.name_of(Mine())
print(name, resolve({"algorithm": name}).method)
"""


class Undeclared(FedAvg):
    """Not a dataclass: its argument is no field."""

    title = "Undeclared"

    def __init__(self, mu=0.0):
        object.__setattr__(self, "mu", mu)


class Needed(Undeclared):
    def __init__(self, mu):
        super().__init__(mu)


@dataclass(frozen=True)
class Derived(FedAvg):
    """What follows from the fields may be kept."""

    title = "Derived"
    words: str = hyperparameter("1,2", "numbers")

    def __post_init__(self):
        object.__setattr__(self, "numbers", torch.tensor([float(word) for word in self.words.split(",")]))
        object.__setattr__(self, "function", lambda: self.numbers)  # which is equal to no other

    @cached_property
    def total(self):
        return float(self.numbers.sum())


@dataclass(frozen=True)
class Halved(FedAvg):
    title = "Halved"
    mu: float = hyperparameter(0.5, "μ")

    def __post_init__(self):
        object.__setattr__(self, "mu", self.mu / 2)


@pytest.mark.parametrize("part", [Undeclared(50.0), Undeclared(torch.ones(3)), Undeclared([1, 2])])
def test_an_argument_that_is_no_field_is_refused(part):
    """A part is made of its hyper-parameters again, so all else would be lost."""
    with pytest.raises(UserError, match=r"algorithm: .*Undeclared keeps mu outside its hyper-parameters, where it"):
        fedman.run(clients=3, rounds=1, algorithm=part)


def test_parts_that_their_fields_make_again_are_taken():
    assert ALGORITHMS.name_of(Undeclared()).endswith(":Undeclared")
    with pytest.raises(UserError, match=r"Halved changes its hyper-parameter mu: of 0\.2 its constructor makes 0\.1"):
        ALGORITHMS.name_of(Halved(0.4))
    derived = Derived("3,4,5")
    assert derived.total == 12.0
    assert ALGORITHMS.name_of(derived).endswith(":Derived")
    with pytest.raises(UserError, match=r"Needed cannot be made from its hyper-parameters, none \(TypeError: .*mu"):
        ALGORITHMS.name_of(Needed(1.0))


def test_an_instance_of_a_class_of_the_script(tmp_path):
    (tmp_path / "script.py").write_text(MAIN)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("__main__:Mine Mine\n", "")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package: a module, and a dist-info folder that announces its algorithms."""
    folder = tmp_path / "site"
    about = folder / "fedman_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fedman-plugin\nVersion: 1.0\n")
    lines = ["fedplug = fedman_plugin:FedPlug", "fedavg = fedman_plugin:FedPlug", "fedbroken = fedman_plugin:Missing"]
    (about / "entry_points.txt").write_text("\n".join(["[fedman.algorithms]", *lines, ""]))
    (folder / "fedman_plugin.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedman.algorithms import hyperparameter\n"
        "from fedman.algorithms.fedavg import FedAvg\n\n"
        "@dataclass(frozen=True)\n"
        "class FedPlug(FedAvg):\n"
        "    title = 'FedPlug'\n"
        "    plugged: float = hyperparameter(0.5, 'how much')\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "fedman_plugin", None)
    monkeypatch.delitem(sys.modules, "fedman_plugin")
    announced.cache_clear()  # what is installed is read once
    for registry in PARTS.values():
        monkeypatch.setattr(registry, "__dict__", {k: v for k, v in vars(registry).items() if k != "installed"})
    yield folder
    announced.cache_clear()


def test_an_entry_point_of_an_installed_package(plugin):
    """It has a name; fedman's own names stay fedman's; one that is broken harms nobody who does not name it."""
    assert list(ALGORITHMS) == [*NAMES["algorithm"], "fedplug", "fedbroken"]
    assert ALGORITHMS["fedavg"] is FedAvg
    assert resolve({"algorithm": "fedplug", "plugged": "0.1"}).hyper == {"plugged": 0.1}
    assert {part.__name__ for part in registered()} >= {"FedPlug", "FedAvg"}
    with pytest.raises(UserError, match=r"^plugged: fedavg has no such hyper-parameter \(it has none\)$"):
        resolve({"plugged": 1})
    with pytest.raises(UserError, match=r"^algorithm: fedman_plugin has no Missing"):
        resolve({"algorithm": "fedbroken"})
    with pytest.raises(UserError, match="no algorithm named 'fedplugg'; did you mean fedplug"):
        resolve({"algorithm": "fedplugg"})


def test_installed_packages_are_not_imported_before_they_are_named(plugin):
    resolve({"algorithm": "fedavg", "zeta": 0.1})
    assert "fedman_plugin" not in sys.modules


def test_a_broken_package_does_not_keep_commands_from_starting(plugin):
    code = "from fedman.cli import main; main(['--version'])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fedman ")


HEAD = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from fedman.algorithms import Algorithm, descend, hyperparameter
from fedman.algorithms.fedavg import FedAvg

CONSTANT = 3

def function(w):
    return w
"""

CLASSES = {
    "not an algorithm": (
        "class Bad: pass",
        "algorithm: own:Bad is the class Bad, not a subclass of fedman.algorithms.Algorithm",
    ),
    "an instance": ("Bad = FedAvg()", "algorithm: own:Bad is a FedAvg, not a subclass"),
    "no default": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    beta: float",
        "algorithm: beta of own:Bad has no default; every hyper-parameter needs one",
    ),
    "a type that is no key's": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    betas: tuple = (0.9, 0.99)",
        "algorithm: betas of own:Bad is <class 'tuple'>; allowed are bool, int, float and str",
    ),
    "a type that is not there": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    beta: 'Float' = 0.9",
        "algorithm: the types of own:Bad's fields are not known: name 'Float' is not defined",
    ),
    "a default of another type": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    beta: float = 'much'",
        "algorithm: the default of beta of own:Bad is 'much', not",
    ),
    "a factory of defaults": (
        "from dataclasses import field\n"
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    beta: float = field(default_factory=float)",
        "algorithm: beta of own:Bad has no default",
    ),
    "not decorated": (
        "class Bad(FedAvg):\n    beta: float = 0.9",
        "algorithm: own:Bad is not a dataclass; put @dataclass(frozen=True) before it",
    ),
    "abstract": (
        "@dataclass(frozen=True)\nclass Bad(Algorithm):\n    title = 'Bad'",
        "algorithm: own:Bad does not define step",
    ),
    "without a title": (
        "@dataclass(frozen=True)\nclass Bad(Algorithm):\n    def step(self, w, grad, server, client, hp): return w",
        "algorithm: own:Bad does not define title",
    ),
    "a key of every run": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    rounds: int = 3",
        "algorithm: own:Bad's hyper-parameter rounds has the name of a key of every run; rename it",
    ),
    "the weight of the penalty": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    zeta: float = 0.1",
        "algorithm: own:Bad's hyper-parameter zeta has the name of a key of every run; rename it",
    ),
    "a name of another part": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    momentum: float = 0.9",
        "algorithm: own:Bad's hyper-parameter momentum is one of the optimizer's too; rename it",
    ),
    "not frozen": ("@dataclass\nclass Bad(FedAvg):\n    beta: float = 0.9", "cannot inherit non-frozen"),
    "mutable default": (
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    betas: list = []",
        "algorithm: own:Bad cannot be imported (ValueError: mutable default",
    ),
    "an import that raises": (
        "raise RuntimeError('no licence\\nfound')\nclass Bad: pass",
        "algorithm: own:Bad cannot be imported (RuntimeError: no licence)",
    ),
    "an import that exits": ("raise SystemExit(5)", "algorithm: own:Bad cannot be imported (SystemExit: 5)"),
    "an import of what is missing": (
        "import no_such_package",
        "algorithm: own:Bad cannot be imported (ModuleNotFoundError: No module named 'no_such_package')",
    ),
    "no Python": ("class Bad(:", "algorithm: own:Bad cannot be imported (SyntaxError: invalid syntax"),
    "nothing of this name": ("class Badd: pass", "algorithm: own has no Bad; did you mean Badd?"),
}  # fmt: skip


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module `own` into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(code):
        (tmp_path / "own.py").write_text(HEAD + code + "\n")

    yield write
    sys.modules.pop("own", None)


def refused(**keys) -> str:
    """Why a run is refused: one line."""
    with pytest.raises(UserError) as error:
        fedman.run(clients=4, rounds=1, epochs=1, device="cpu", **keys)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize("case", CLASSES)
def test_classes_that_cannot_be_used(case, own):
    code, message = CLASSES[case]
    own(code)
    assert message in refused(algorithm="own:Bad")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own:function", "algorithm: own:function is a function, not a subclass of fedman.algorithms.Algorithm"),
        ("own:CONSTANT", "algorithm: own:CONSTANT is an int, not a subclass"),
        ("own:torch", "algorithm: own:torch is a module, not a subclass"),
        ("own:FedAvg.title", "algorithm: own:FedAvg.title is a str, not a subclass"),
        ("own:FedAvg.no", "algorithm: own has no FedAvg.no"),
        ("own:FedAvgg", "algorithm: own has no FedAvgg; did you mean FedAvg?"),
        ("own:", "algorithm: no algorithm named 'own:'"),
        (":Bad", "algorithm: no algorithm named ':Bad'"),
        ("own", "algorithm: no algorithm named 'own'; there are fedavg, "),
        ("nowhere:Bad", "algorithm: nowhere:Bad cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        (".own:Bad", "algorithm: .own:Bad cannot be imported (TypeError: "),
        ("fedman.optimizers:SGD", "algorithm: fedman.optimizers:SGD is the class SGD, not a subclass"),
    ],
)
def test_names_that_lead_nowhere(name, message, own):
    own("")
    assert message in refused(algorithm=name)


def test_hyperparameters_of_what_cannot_be_imported_are_no_mistyped_keys(own):
    assert refused(algorithm="nowhere:Bad", beta=0.5).startswith("algorithm: nowhere:Bad cannot be imported")


@pytest.mark.parametrize(("kind", "registry"), PARTS.items())
def test_every_kind_of_part_is_checked_alike(kind, registry, own):
    own("class Bad: pass")
    assert refused(**{kind: "own:Bad"}).startswith(f"{kind}: own:Bad is the class Bad, not a subclass of fedman.")
    assert refused(**{kind: "own:Missing"}).startswith(f"{kind}: own has no Missing")
    assert registry.base.__name__ in refused(**{kind: "own:function"})


STEP = "    def step(self, w, grad, server, client, hp): return descend(w, grad(w), hp)\n"
ALGORITHM = "@dataclass(frozen=True)\nclass Bad(Algorithm):\n    title = 'Bad'\n"
METHODS = {
    "step writes to w": (
        "    def step(self, w, grad, server, client, hp): return w.sub_(hp.lr * grad(w))",
        "algorithm: Bad writes to its input w; a step must return new tensors",
    ),
    "step writes to the server": (
        "    def step(self, w, grad, server, client, hp):\n        server['w'].mul_(2)\n        return w",
        "algorithm: Bad writes to its input server['w']",
    ),
    "begin writes to the memory": (
        "    client = ('c',)\n"
        "    def begin(self, server, client, hp): return {'pull': client['c'].add_(1)}\n" + STEP
        + "    def finish(self, w, server, client, hp): return {'c': client['c']}, {'w': w}",
        "algorithm: Bad writes to its input client['c']",
    ),
    "step writes to what begin made": (
        "    def begin(self, server, client, hp): return {'pull': server['w'] / hp.p}\n"
        "    def step(self, w, grad, server, client, hp): return w + client['pull'].mul_(2)",
        "algorithm: Bad writes to its input client['pull']",
    ),
    "update writes to the server": (
        STEP + "    def update(self, server, mean, fraction): return {'w': server['w'].add_(mean['w'])}",
        "algorithm: Bad writes to its input server['w']",
    ),
    "step of wrong shape": (
        "    def step(self, w, grad, server, client, hp): return w.sum(-1)",
        "algorithm: Bad.step returns w with shape (3,); (3, 2) is wanted here",
    ),
    "step without a result": (
        "    def step(self, w, grad, server, client, hp): pass",
        "algorithm: Bad.step returns w with NoneType; (3, 2) is wanted here",
    ),
    "a norm over clients": (
        "    def step(self, w, grad, server, client, hp): return w / w.norm(dim=0, keepdim=True).expand_as(w[:2])",
        "algorithm: Bad.step fails (RuntimeError: ",
    ),
    "a norm over clients too": (
        "    def step(self, w, grad, server, client, hp): return w - hp.lr * grad(w) / grad(w).norm()",
        "algorithm: Bad gives a client something else among others than alone; norms and sums run over the last axis",
    ),
    "a mean over clients": (
        STEP + "    def finish(self, w, server, client, hp): return {}, {'w': w - w.mean(0)}",
        "algorithm: Bad gives a client something else among others than alone",
    ),
    "a step towards the next client": (
        "    def step(self, w, grad, server, client, hp):\n        first, second, *_ = w.split(1)\n"
        "        return descend(w, grad(w) + first - second, hp)",
        "algorithm: Bad.step of a client alone fails (ValueError: not enough values to unpack (expected at least 2",
    ),
    "step without its scratch": (
        "    scratch = ('s',)\n    def step(self, w, grad, server, client, hp): return w, {}",
        "algorithm: Bad.step returns the vectors nothing; wanted is s",
    ),
    "scratch of wrong shape": (
        "    scratch = ('s',)\n    def step(self, w, grad, server, client, hp): return w, {'s': server['w']}",
        "algorithm: Bad.step returns s with shape (2,); (3, 2) is wanted here",
    ),
    "step that fails": (
        "    def step(self, w, grad, server, client, hp): return descend(w, client['momentum'], hp)",
        "algorithm: Bad.step fails (KeyError: 'momentum')",
    ),
    "finish without w": (
        STEP + "    def finish(self, w, server, client, hp): return {}, {'change': w - server['w']}",
        "algorithm: Bad.finish returns the upload change; wanted is change, w",
    ),
    "finish without a memory": (
        "    client = ('c',)\n" + STEP,
        "algorithm: Bad.finish returns the memory nothing; wanted is c",
    ),
    "a memory of wrong shape": (
        "    client = ('c',)\n" + STEP
        + "    def finish(self, w, server, client, hp): return {'c': w.mean(0)}, {'w': w}",
        "algorithm: Bad.finish returns c with shape (2,); (3, 2) is wanted here",
    ),
    "an upload of wrong shape": (
        STEP + "    def finish(self, w, server, client, hp): return {}, {'w': w, 'n': w.norm(dim=-1)}",
        "algorithm: Bad.finish returns n with shape (3,); (3, 2) is wanted here",
    ),
    "finish with one result": (
        STEP + "    def finish(self, w, server, client, hp): return {'w': w}",
        "algorithm: Bad.finish fails (ValueError: not enough values to unpack",
    ),
    "update without a vector": (
        "    server = ('w', 'm')\n" + STEP,
        "algorithm: Bad.update returns the vectors w; wanted is m, w",
    ),
    "update of wrong shape": (
        STEP + "    def update(self, server, mean, fraction): return {'w': mean['w'].norm()}",
        "algorithm: Bad.update returns w with shape (); (2,) is wanted here",
    ),
    "a server without the model": (
        "    server = ('m',)\n" + STEP + "    def update(self, server, mean, fraction): return {'m': mean['w']}",
        "algorithm: Bad.server has no 'w', the server's model",
    ),
    "a cloud that is not there": ("    cloud = 'z'\n" + STEP, "algorithm: Bad.server has no 'z', the server's model"),
}  # fmt: skip


@pytest.mark.parametrize("case", METHODS)
def test_algorithms_that_break_their_contract(case, own, tmp_path):
    """Told before the first round, and before anything is written."""
    code, message = METHODS[case]
    own(ALGORITHM + code)
    assert refused(algorithm="own:Bad", out=tmp_path / "out").startswith(message)
    assert not (tmp_path / "out").exists()


def test_the_built_in_algorithms_and_optimisers_keep_their_contract():
    for name in NAMES["algorithm"]:
        assert check_algorithm(ALGORITHMS[name]()) == ALGORITHMS[name]()
    for name in NAMES["optimizer"]:
        assert check_optimizer(OPTIMIZERS[name]()) == OPTIMIZERS[name]()


ZEROS = "    def init(self, w): return {'m': w.new_zeros(w.shape)}\n"
UPDATE = "    def update(self, w, g, state, hp, extra_decay=0.0): "
OPTIMIZERS_OF_USERS = {
    "no state returned": (UPDATE + "return w - hp.lr * g[0]", "optimizer: Bad.update fails (ValueError: "),
    "no decay taken": (
        "    def update(self, w, g, state, hp): return w, state",
        "optimizer: Bad.update fails (TypeError: ",
    ),
    "a model of wrong shape": (
        UPDATE + "return g.sum(-1), state",
        "optimizer: Bad.update returns w with shape (3,); (3, 2) is wanted here",
    ),
    "a state without rows": (
        "    def init(self, w): return {'t': w.new_zeros(())}\n" + UPDATE + "return w, state",
        "optimizer: Bad.init returns t with shape (); (3, ...), a row a client, is wanted here",
    ),
    "a state lost": (
        ZEROS + UPDATE + "return w, {}",
        "optimizer: Bad.update returns the state nothing; wanted is m",
    ),
    "a state of another shape": (
        ZEROS + UPDATE + "return w, {'m': g[:, :1]}",
        "optimizer: Bad.update returns m with shape (3, 1); (3, 2) is wanted here",
    ),
    "a norm over clients": (
        ZEROS + UPDATE + "return w - hp.lr * g / g.norm(), state",
        "optimizer: Bad gives a client something else among others than alone",
    ),
    "a state over clients": (
        ZEROS + UPDATE + "return w - hp.lr * state['m'], {'m': g - g.mean(0)}",
        "optimizer: Bad gives a client something else among others than alone",
    ),
    "writes to its state": (
        ZEROS + UPDATE + "return w - hp.lr * state['m'].add_(g), state",
        "optimizer: Bad writes to its input state['m']; a step must return new tensors",
    ),
}


@pytest.mark.parametrize("case", OPTIMIZERS_OF_USERS)
def test_optimisers_that_break_their_contract(case, own, tmp_path):
    """Told before the first round, and before anything is written."""
    code, message = OPTIMIZERS_OF_USERS[case]
    own(
        "from fedman import LocalOptimizer\n@dataclass(frozen=True)\nclass Bad(LocalOptimizer):\n    title = 'Bad'\n"
        + code
    )
    assert refused(optimizer="own:Bad", out=tmp_path / "out").startswith(message)
    assert not (tmp_path / "out").exists()


def test_the_built_in_algorithms_can_be_stacked():
    assert all(can_be_stacked(ALGORITHMS[name]) for name in NAMES["algorithm"])


LONE = "    alpha: float = hyperparameter(0.1, 'a number')\n    k: int = hyperparameter(1, 'a count')\n"
ALONE = {
    "a count": "for _ in range(self.k): w = descend(w, grad(w), hp)\n        return w",
    "a branch": "return descend(w, grad(w) if self.alpha > 0.15 else 2 * grad(w), hp)",
    "a norm of the server's": "return descend(w, grad(w) + self.alpha * server['w'].norm() * w, hp)",
}


@pytest.mark.parametrize("case", ALONE)
def test_an_algorithm_that_cannot_be_stacked_is_swept_run_by_run(case, own, tmp_path):
    own(ALGORITHM + LONE + f"    def step(self, w, grad, server, client, hp):\n        {ALONE[case]}\n")
    keys = {"clients": "4", "rounds": "1", "epochs": "1", "participation": "1"}
    grid = cells({**keys, "algorithm": "own:Bad", "alpha": "0.1,0.2", "k": "1,2"})
    assert not can_be_stacked(ALGORITHMS["own:Bad"])
    assert len({stack_key(cell.config) for cell in grid}) == 4
    sweep.run(grid, {grid[0].config.source: fedman.data.load("digits")}, tmp_path, "cpu", 4 * [print], print)
    for cell in grid:
        alone = fedman.run(**{**cell.config.flat(), "rounds": 1}).summary
        assert RunFolder(tmp_path / cell.name).ending()["test_loss"] == alone["test_loss"]


def test_bad_input_on_the_command_line(own, tmp_path):
    """One line and exit code 2; what an import prints or raises is no traceback."""
    own("raise RuntimeError('no licence')")
    words = [sys.executable, "-P", "-m", "fedman", "run", "algorithm=own:Bad", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    wanted = "fedman: error: algorithm: own:Bad cannot be imported (RuntimeError: no licence)\n"
    assert (done.stdout, done.stderr) == ("", wanted)
    assert not (tmp_path / "out").exists()


def test_hyperparameters_are_the_fields_in_order():
    assert hyperparameters(Own) == {"beta": 0.5}
    registry = Registry("algorithm", Algorithm, {"own": Own})
    assert (list(registry), registry["own"], registry.name_of(Own())) == (["own"], Own, "own")
