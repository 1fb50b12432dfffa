"""Configurations: flat keys of every algorithm, hyper-parameters from its own fields, all mistakes at once."""

import subprocess
import sys
import time
from dataclasses import dataclass, fields

import pytest

import fedman
from fedman.algorithms import ALGORITHMS, hyperparameter, hyperparameters
from fedman.algorithms.fedavg import FedAvg
from fedman.config import KEYS, PARTS, Config, Preset, config_class, parse_value, registered, resolve
from fedman.errors import UserError
from fedman.runs.atomic import write_toml
from fedman.runs.key_text import read_toml
from fedman.training.settings import Training

SHARED = {
    "dataset": "digits",
    "augment": False,
    "partition": "dir0.3",
    "partition_seed": 0,
    "unbalanced": 0.0,
    "clients": 100,
    "participation": 0.1,
    "cohort": "bernoulli",
    "schedule_seed": 0,
    "model": "mlp",
    "zeta": 0.0,
    "man_logits": True,
    "man_variant": "formula",
    "rounds": 500,
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 0.001,
    "clip": 10.0,
    "seed": 0,
    "eval_every": 1,
    "eval_others_every": 10,
    "precision": "auto",
    "checkpoint_seconds": 60.0,
    "keep_state": True,
}
HYPER = {
    "fedavg": {},
    "fedsam": {"rho": 0.05},
    "fedasam": {"rho": 0.5, "eta": 0.2},
    "feddyn": {"alpha": 0.01},
    "feddc": {"alpha": 0.01, "decayed": False},
    "fedspeed": {"alpha": 0.01, "rho": 0.1, "stale_ascent": False},
    "fedprox": {"mu": 0.0001},
    "scaffold": {"decayed": False},
    "fedavgm": {"server_momentum": 0.9, "server_lr": 1.0},
    "fedadam": {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "fedcm": {"alpha": 0.1},
    "mofedsam": {"alpha": 0.1, "rho": 0.1},
    "fedgamma": {"decayed": True, "rho": 0.1},
    "fedsmoo": {"alpha": 0.1, "rho": 0.1, "mu_alone": False},
    "fedlesam": {"rho": 0.1, "last_round": False},
    "fedlesam-d": {"alpha": 0.1, "rho": 0.1, "last_round": False},
    "fedacg": {"mu": 0.001, "server_momentum": 0.85},
    "fedgloss": {"alpha": 0.01, "rho": 0.01, "rho_local": 0.05, "state_scale": 1.0},
}


def mistakes(values, preset=None):
    with pytest.raises(UserError) as error:
        resolve(values, preset)
    return str(error.value).split("\n")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_flat_keys_of_every_algorithm(algorithm, tmp_path):
    config = resolve({"algorithm": algorithm})
    expected = {**SHARED, "algorithm": algorithm, **HYPER[algorithm]}
    assert config.flat() == expected
    assert {key: type(value) for key, value in config.flat().items()} == {k: type(v) for k, v in expected.items()}
    write_toml(tmp_path / "config.toml", config.flat())
    assert resolve(read_toml(tmp_path / "config.toml")) == config
    assert resolve({key: str(value) for key, value in config.flat().items()}) == config
    assert list(config.flat())[-len(HYPER[algorithm]) or len(expected) :] == list(HYPER[algorithm])


def test_hyperparameters_are_parsed_and_apart():
    config = resolve({"algorithm": "feddc", "alpha": "0.10", "decayed": "true"})
    assert config.hyper == {"alpha": 0.1, "decayed": True}
    assert ALGORITHMS["feddc"](**config.hyper).decayed is True
    assert resolve({"algorithm": "feddc", "alpha": None, "rho": None}).hyper == {"alpha": 0.01, "decayed": False}


def test_values_over_preset_over_defaults():
    preset = Preset({"algorithm": "fedspeed", "lr": 0.2}, lambda config: {"rho": config.lr, "alpha": 0.5})
    assert resolve({}, preset).hyper == {"alpha": 0.5, "rho": 0.2, "stale_ascent": False}
    assert resolve({"lr": "0.3", "alpha": "0.25"}, preset).hyper == {"alpha": 0.25, "rho": 0.3, "stale_ascent": False}
    assert resolve({"lr": 0.3}, Preset({"rounds": 3, "lr": 0.2})).flat() == resolve({"rounds": 3, "lr": 0.3}).flat()


def test_all_mistakes_at_once():
    words = {
        "algorithm": "feddc",
        "alpha": "-1",
        "decayed": "maybe",
        "rho": "1",
        "alhpa": "1",
        "zeta": "nan",
        "hyper": 1,
    }
    assert mistakes(words) == [
        "6 mistakes",
        "rho: feddc has no such hyper-parameter (it has alpha, decayed)",
        "alhpa: no such key; did you mean alpha?",
        "hyper: no such key; see fedman list",
        "zeta: should be a finite number, not 'nan'",
        "alpha: should be greater than or equal to 0, not '-1'",
        "decayed: should be true or false, not 'maybe'",
    ]
    assert mistakes({"algorithm": "feddcc", "alpha": "-1"}) == [
        "2 mistakes",
        "alpha: should be greater than or equal to 0, not '-1'",
        "algorithm: no algorithm named 'feddcc'; did you mean feddc?",
    ]
    assert mistakes({"man_variant": "large"}) == ["man_variant: 'large' is not one of formula, tiny-code"]


@pytest.mark.parametrize("value", ["nan", "inf", "-0.1", "x", "", [1], {}])
@pytest.mark.parametrize(("algorithm", "key"), [(a, k) for a, hyper in HYPER.items() for k in hyper])
def test_bad_hyperparameters(algorithm, key, value):
    (mistake,) = mistakes({"algorithm": algorithm, key: value})
    assert mistake.startswith(f"{key}: should be ")


@dataclass(frozen=True)
class Mine(FedAvg):
    title = "Mine"
    beta: float = hyperparameter(0.9, "β, momentum", maximum=1.0)
    shift: float = hyperparameter(0.0, "any number", minimum=float("-inf"))
    repeats: int = 3


def test_an_algorithm_from_outside_brings_its_own_hyperparameters():
    given = {"algorithm": "tests.test_config:Mine", "beta": "0.5", "shift": "-2", "repeats": "4"}
    assert resolve(given).hyper == {"beta": 0.5, "shift": -2.0, "repeats": 4}
    assert resolve(given).flat() == {**SHARED, **given, "beta": 0.5, "shift": -2.0, "repeats": 4}
    assert mistakes({**given, "beta": 2}) == ["beta: should be less than or equal to 1, not 2"]
    assert mistakes({**given, "beta": 2, "repeats": 0.5, "bta": 1})[0] == "3 mistakes"
    assert mistakes({"beta": 0.5}) == ["beta: no such key; did you mean beta2?"]


def test_defaults_of_training_are_those_of_the_configuration():
    assert {f.name: KEYS[f.name].default for f in fields(Training)} == vars(Training())
    assert Training(lr=0.5, lr_decay=0.9).rate(2) == 0.5 * 0.9**2


def test_keys_are_those_of_every_run():
    assert set(KEYS) == set(Config.model_fields)
    hyper = set(config_class(registered()).model_fields) - set(KEYS)
    parts = {
        key for kind in PARTS if kind != "algorithm" for part in PARTS[kind].values() for key in hyperparameters(part)
    }
    assert hyper - parts == {key for keys in HYPER.values() for key in keys}
    assert parse_value("zeta", "0.150") == 0.15
    assert parse_value("stale_ascent", "false") is False


def test_configurations_import_neither_torch_nor_numpy_nor_the_paper():
    code = "import sys, fedman.config, fedman.runs.grid\n"
    code += "fedman.config.resolve({'dataset': 'cifar100', 'algorithm': 'feddyn', 'partition': 'path2'})\n"
    code += "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
    code += "sys.exit(bool(heavy) or any(m.startswith('fedman.paper') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_python_calls_take_hyperparameters_and_do_not_override_a_preset():
    small = {"model": "mlp", "clients": 5, "participation": 0.4, "rounds": 1, "epochs": 1, "device": "cpu"}
    result = fedman.run(algorithm="feddc", alpha=0.1, **small)
    assert result.summary["config"]["alpha"] == 0.1
    assert result.summary["config"]["dataset"] == "digits"
    with pytest.raises(UserError, match="dataset: 'digits' is not that of the preset, cifar100; leave one of them out"):
        fedman.run(preset="cifar100-iid", dataset="digits", **small)
    assert fedman.run(preset="digits", **small).summary["config"]["batch_size"] == 10
    with pytest.raises(UserError, match="cifar100"):
        fedman.run(preset="cifar100-iid", data_dir="nowhere", **small)


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 200_000) + " = 1",
        f"[{'.'.join('a' * 200_000)}]",
        f"a = {{{'.'.join('a' * 200_000)} = 1}}",
        "\n".join(f"{'.'.join('a' * 1000)}{i} = 1" for i in range(400)),
    ],
    ids=["key", "table", "inline", "keys"],
)
def test_nobody_waits_for_dotted_keys(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    started = time.process_time()
    with pytest.raises(UserError, match=r"a\.toml: has more than 2000 dots, which no configuration needs"):
        read_toml(tmp_path / "a.toml")
    assert time.process_time() - started < 1
