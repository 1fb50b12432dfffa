"""The command line: bad input of every kind ends with exit code 2, one message, and nothing written."""

import json
import os
import re
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import fedman
from fedman.algorithms import ALGORITHMS
from fedman.cli import commands
from fedman.cli.commands import main
from fedman.runs import experiment
from tests.cli.command_line import main_ok, refused

# since Python 3.14 Path.exists answers no instead of raising
TOO_LONG = "holds no run" if sys.version_info >= (3, 14) else "x/config.toml: File name too long"

BAD_KEYS = [
    # words of the command line, and what the message must say
    (["zeta"], "'zeta': expected KEY=VALUE"),
    (["=3"], "'=3': expected KEY=VALUE"),
    (["zeta=0.1", "zeta=0.2"], "zeta: given twice"),
    (["zeta=0.1", " zeta = 0.2"], "zeta: given twice"),
    (["--rounds", "3"], "--rounds: not an option but a key; write rounds=VALUE"),
    (["--rho=3"], "--rho: not an option but a key; write rho=VALUE"),
    (["lr=fast"], "lr: should be a number, not 'fast'"),
    (["seed=1,2"], "seed: should be a whole number, not '1,2'; several values, as 0,1,2, are for fedman sweep"),
    (["seed=0-4"], "not '0-4'; several values, as 0,1,2, are for fedman sweep"),
    (["algoritm=feddc"], "algoritm: no such key; did you mean algorithm?"),
    (["Zeta=0.1"], "Zeta: no such key; did you mean zeta?"),
    (["learning_rate=0.1"], "learning_rate: no such key; fedman's is lr"),
    (["criterion=mse"], "criterion: no such key; fedman's is task"),
    (["creterion=mse"], "creterion: no such key; see fedman list"),
    (["__class__=1"], "__class__: no such key"),
    (["model_config=1"], "model_config: no such key"),
    (["algorithm=feddcc"], "no algorithm named 'feddcc'; did you mean feddc?"),
    (["algorithm="], "no algorithm named ''"),
    (["algorithm=FedAvg"], "no algorithm named 'FedAvg'; did you mean fedavg?"),
    (["dataset=cifar1000"], "dataset: 'cifar1000' is not known"),
    (["dataset="], "dataset: '' is not known"),
    (["dataset=../../etc/passwd"], "dataset: '../../etc/passwd' is not known"),
    (["dataset=npz:nowhere.npz"], "nowhere.npz"),
    (["model=resnet"], "no model named 'resnet'"),
    (["model=cifar_cnn"], "too small"),
    (["model=custom"], "model: no model named 'custom'"),
    (["dataset=custom"], "dataset: 'custom' is not known"),
    (["partition=dirichlet0.3"], "dirichlet0.3"),
    (["partition=dir"], "partition"),
    (["partition=dir-1"], "partition"),
    (["partition=dir0"], "partition"),
    (["partition=dirnan"], "partition"),
    (["partition=dirinf"], "partition"),
    (["partition=path0"], "partition"),
    (["partition=path11"], "partition"),
    (["partition=path2.5"], "partition"),
    (["partition=IID"], "partition"),
    (["clients=0"], "clients: should be greater than or equal to 1, not '0'"),
    (["clients=-5"], "clients"),
    (["clients=2.5"], "clients"),
    (["clients=ten"], "clients"),
    (["clients=1e99"], "clients"),
    (["clients=99999999999"], "clients"),
    (["clients=2000"], "2000"),
    (["participation=0"], "participation: should be greater than 0"),
    (["participation=1.1"], "participation"),
    (["participation=nan"], "participation"),
    (["participation=-0.1"], "participation"),
    (["cohort=random"], "cohort: should be 'bernoulli' or 'fixed', not 'random'"),
    (["zeta=-0.1"], "zeta: should be greater than or equal to 0, not '-0.1'"),
    (["zeta=nan"], "zeta: should be a finite number"),
    (["zeta=inf"], "zeta"),
    (["zeta=0,15"], "zeta"),
    (["zeta=0.1.2"], "zeta"),
    (["zeta=true"], "zeta"),
    (["zeta=[0.1]"], "zeta"),
    (["man_logits=maybe"], "man_logits"),
    (["man_variant=code"], "man_variant"),
    (["man_variant=tiny-code"], "man_variant: tiny-code belongs to model tiny_cnn"),
    (["man_variant=tiny-code", "model=tiny_cnn"], "add man_logits=false"),
    (["alpha=0.1"], "alpha: fedavg has no such hyper-parameter (it has none)"),
    (["algorithm=feddyn", "rho=0.1"], "rho: feddyn has no such hyper-parameter (it has alpha)"),
    (["algorithm=fedsam", "eta=0.1"], "eta: fedsam has no such"),
    (["algorithm=fedprox", "alpha=0.1"], "alpha: fedprox has no such"),
    (["algorithm=feddc", "stale_ascent=true"], "stale_ascent: feddc has no such"),
    (["algorithm=fedspeed", "decayed=true"], "decayed: fedspeed has no such"),
    (["algorithm=fedprox", "mu=-1"], "mu"),
    (["algorithm=fedsam", "rho=nan"], "rho"),
    (["algorithm=feddyn", "alpha=-0.01"], "alpha"),
    (["rounds=0"], "rounds"),
    (["rounds=1.5"], "rounds"),
    (["epochs=0"], "epochs"),
    (["epochs=1001"], "epochs: should be less than or equal to 1000"),
    (["dataset=npz:a\0.npz"], "dataset: has a NUL character"),
    (["--config", "/dev/zero"], "/dev/zero: has more than 1048576 bytes"),
    (["epochs=-1"], "epochs"),
    (["batch_size=0"], "batch_size"),
    (["batch_size=many"], "batch_size"),
    (["lr=0"], "lr: should be greater than 0"),
    (["lr=-0.1"], "lr"),
    (["lr=nan"], "lr"),
    (["lr=1e-1e"], "lr"),
    (["lr_decay=0"], "lr_decay"),
    (["lr_decay=1.5"], "lr_decay"),
    (["weight_decay=-1e-3"], "weight_decay"),
    (["clip=0"], "clip"),
    (["clip=-1"], "clip"),
    (["clip=nan"], "clip"),
    (["seed=-1"], "seed"),
    (["seed=2147483648"], "seed"),
    (["seed=x"], "seed"),
    (["unbalanced=-1"], "unbalanced"),
    (["unbalanced=100"], "unbalanced"),
    (["target=0"], "target"),
    (["target=101"], "target"),
    (["eval_every=0"], "eval_every"),
    (["precision=fp8"], "precision"),
    (["precision=tf32"], "precision: tf32 needs a CUDA device"),
    (["chunk=0"], "chunk"),
    (["checkpoint_seconds=-1"], "checkpoint_seconds"),
    (["zeta=" + "9" * 5000], "zeta"),
    (["rounds=" + "9" * 5000], "rounds"),
    (["dataset=\x1b[31m\n\nTraceback"], "dataset"),
    (["--preset", "cifar100"], "no preset named 'cifar100'; did you mean cifar10"),
    (["--preset", "digits", "alpha=1"], "alpha: fedavg has no such"),
    (["--config", "missing.toml"], "missing.toml: No such file"),
    (["--resume"], "--resume: name the run's folder with --out"),
    (["--resume", "--out", "missing"], "missing: holds no run that could be resumed (no config.toml)"),
    (["--preset", "digits", "--resume", "--out", "missing"], "missing: holds no run that could be resumed"),
    (["--preset", "digits", "--out", "x" * 256], "File name too long"),
    (["--config", "x" * 256], "x: File name too long"),
    (["--resume", "--out", "x" * 256], TOO_LONG),
    (["--config", "a\udcff.toml"], r"a\udcff.toml: No such file"),
    (["dataset=npz:a\udcff.npz"], "dataset: is not Unicode text"),
    (["--device", "tpu"], "device: 'tpu' is not one of auto, cpu, cuda, cuda:0, ..."),
    (["--device", "cuda:x"], "device: 'cuda:x' is not one of auto, cpu, cuda, cuda:0, ..."),
    (["--device", "mps"], "device: mps has no float64, in which clients are summed; use cpu"),
    (["--device", "cuda"], "device: no CUDA device is available"),
    (["dataset=cifar100", "data_dir=nowhere"], "fedman data get cifar100"),
    (["dataset=mnist", "data_dir=nowhere"], "fedman data get mnist"),
    (["dataset=tiny-imagenet", "data_dir=nowhere"], "fedman data get tiny-imagenet"),
    (["clients=4", "augment=true", "dataset=npz:rows.npz"], "augment: npz:rows.npz holds no images of bytes"),
    (["clients=4", "model=small_cnn", "dataset=npz:rows.npz"], "needs images"),
    (["dataset=npz:broken.npz"], "broken.npz"),
    (["dataset=cifar100", "data_dir=damaged"], "cifar-100-binary.tar.gz"),
    (["dataset=mnist", "data_dir=damaged"], "train-images-idx3-ubyte.gz"),
    (["dataset=tiny-imagenet", "data_dir=damaged"], "tiny-imagenet-200.zip"),
    (["--nonsense"], "No such option"),
]  # fmt: skip

BAD_TOML = [
    ("zeta = ", "not a TOML file"),
    ("zeta = 0.1\nzeta = 0.2", "not a TOML file"),
    ("[run]\nzeta = 0.1", "keys are flat; [run] is a table"),
    ("zeta = [0.1, 0.2]", "zeta"),
    ("zeta = 'much'", "zeta"),
    ("rounds = 3.7", "rounds"),
    ("zetta = 0.1", "zetta: no such key; did you mean zeta?"),
    ("algorithm = 3", "algorithm"),
    ("lr = nan", "lr"),
    ("date = 2020-01-01", "date: no such key"),
    ("rounds = " + "9" * 5000, "not a TOML file"),
    ("zeta = " + "[" * 5000, "not a TOML file"),
    ("".join(f"key{i} = 1\n" for i in range(1000)), "1000 mistakes\nkey0: no such key"),
    ("".join(f"key{i} = 1\n" for i in range(1000)), "key39: no such key; see fedman list\nand 960 more\n"),
    ('"a\\u001b[31m\\u202e" = 1', r"a\x1b[31m\u202e: no such key"),
    (f"{'a' * 100_000} = 1", "… "),
]


def test_there_are_a_hundred_of_them():
    assert len(BAD_KEYS) + len(BAD_TOML) >= 100


@pytest.mark.parametrize(("words", "message"), BAD_KEYS, ids=[" ".join(w)[:40] for w, _ in BAD_KEYS])
def test_bad_settings(workplace, tmp_path, capsys, words, message):
    err = refused(capsys, ["run", *words])
    assert message in err
    assert len(err) < 1500
    assert sorted(p for p in tmp_path.rglob("*")) == workplace


@pytest.mark.parametrize(("text", "message"), BAD_TOML, ids=range(len(BAD_TOML)))
def test_bad_config_files(workplace, tmp_path, capsys, text, message):
    (tmp_path / "bad.toml").write_text(text)
    err = refused(capsys, ["run", "--config", "bad.toml"])
    assert message in err
    assert len(err) < 1500
    assert not (tmp_path / "runs").exists()


def test_all_mistakes_at_once(workplace, capsys):
    err = refused(capsys, ["run", "algoritm=feddc", "zeta=-1", "mu=3", "partition=x", "rounds=0"])
    assert "5 mistakes" in err
    for key in ("algoritm", "zeta", "mu", "partition", "rounds"):
        assert f"\n{key}: " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=fedavg,fedavgg"], "no algorithm named 'fedavgg'"),
        (["zeta=0,0.1,0"], "zeta: a value stands twice"),
        (["zeta=0.1,0.10"], "zeta: a value stands twice"),
        (["seed=0,00"], "seed: a value stands twice"),
        (["algorithm=fedavg,fedsam", "alpha=0.1"], "alpha: fedavg has no such hyper-parameter"),
        (["seed=0,,1"], "seed"),
        ([f"seed={','.join(map(str, range(101)))}", f"zeta={','.join(map(str, range(100)))}"], "101 seed x 100 zeta"),
        (["seed=0,x"], "seed"),
    ],
)
def test_bad_sweeps(workplace, tmp_path, capsys, words, message):
    assert message in refused(capsys, ["sweep", *words])
    assert not (tmp_path / "runs").exists()


def test_no_such_command(workplace, capsys):
    assert "No such command" in refused(capsys, ["trian"])


@pytest.mark.parametrize(
    ("words", "suggestion"), [(["rum"], "run"), (["data", "sho"], "show"), (["flower", "simulat"], "simulate")]
)
def test_a_command_is_suggested_once(workplace, capsys, words, suggestion):
    assert refused(capsys, words).count(f"Did you mean '{suggestion}'?") == 1


@pytest.mark.parametrize("module", ["fedman.cli", "fedman.cli.commands"])
def test_modules_that_are_taken_for_the_command(module):
    """They are it: nothing exits with 0 having done nothing."""
    command = [sys.executable, "-m", module, "run", "zetta=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean zeta" in done.stderr


def test_a_folder_that_holds_a_run_is_not_overwritten(workplace, tmp_path, capsys):
    words = ["run", "--preset", "digits", "model=mlp", "rounds=1", "--out", "here"]
    main_ok(words)
    before = (tmp_path / "here" / "summary.json").read_bytes()
    capsys.readouterr()
    assert "here: holds a run already; add --resume" in refused(capsys, words)
    unread = ["run", "dataset=npz:gone.npz", "--out", "here"]  # data are read only for a folder that is fit
    assert "here: holds a run already; add --resume" in refused(capsys, unread)
    message = "there: holds no run that could be resumed"
    assert message in refused(capsys, ["run", "--preset", "digits", "--out", "there", "--resume"])
    assert "holds a run of another configuration; lr differ" in refused(capsys, [*words, "lr=0.05", "--resume"])
    assert (tmp_path / "here" / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    "own",
    [{"dataset": (np.eye(10), np.arange(10) % 2) * 2}, {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))},
     {"partition": [range(9), range(9, 20)]}],
    ids=["arrays", "module", "clients"],
)  # fmt: skip
def test_a_run_of_python_objects_is_not_resumed_by_a_command(workplace, capsys, own):
    fedman.run(**own, **({} if "partition" in own else {"clients": 2}), rounds=1, participation=1.0, out="mine")
    message = "mine: a run of your own arrays, module or clients; resume it in Python, with resume=True"
    assert message in refused(capsys, ["run", "--out", "mine", "--resume", "rounds=2"])


def test_torch_is_imported_before_a_refused_command_ends(workplace, capsys, monkeypatch):
    """Else its import would meet an interpreter that shuts down, and print a traceback."""
    imported = []
    monkeypatch.setattr(commands, "load_torch", lambda device: (time.sleep(0.3), imported.append(device)))
    assert "nothing found in data_dir nowhere" in refused(capsys, ["run", "dataset=cifar10", "data_dir=nowhere"])
    assert imported == ["auto"]


def test_a_folder_that_cannot_be_written(workplace, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert "file/run: cannot be written" in refused(
        capsys, ["run", "--preset", "digits", "rounds=1", "--out", "file/run"]
    )


@pytest.mark.parametrize("ask", [lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50)])
def test_not_enough_memory(workplace, tmp_path, capsys, monkeypatch, ask):
    """torch and numpy say so in different ways."""
    monkeypatch.setattr(experiment, "run_stacked", lambda *given, **named: ask())
    assert "error: not enough memory; fewer clients" in refused(capsys, ["run", "--preset", "digits", "rounds=1"])


def test_a_mistake_of_ours_says_what_to_report(workplace, capsys, monkeypatch):
    """The last net: one line, which is not that of bad input; the traceback is there for who asks."""
    monkeypatch.setattr(experiment, "run_stacked", lambda *given, **named: torch.ones(2) @ torch.ones(3))
    words = ["run", "--preset", "digits", "rounds=1"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    line = r"fedman: internal error in fedman \S+, experiment\.py:\d+: RuntimeError: [^\n]* size[^\n]*; please report"
    assert re.match(line, said)
    assert said.count("\n") == 1
    monkeypatch.setenv("FEDMAN_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="size"):
        main(words)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_a_terminal_without_our_letters(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "fedman", "list"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert rb"\u03b6" in done.stdout


def test_a_run_in_a_folder_that_is_not_unicode(workplace, capsys):
    out = os.fsdecode(b"r\xff")
    main_ok(["run", "--preset", "digits", "model=mlp", "rounds=1", "--out", out])
    main_ok(["run", "--out", out, "--resume"])
    main_ok(["results", out, "--out", f"{out}.jsonl"])
    main_ok(["report", ".", "--out", f"{out}.html"])
    main_ok(["verify", "."])
    assert r"r\udcff" in capsys.readouterr().out


def test_control_characters_of_files_do_not_reach_the_terminal(workplace, tmp_path, capsys):
    words = ["run", "--preset", "digits", "model=mlp", "rounds=1", "--out", "here"]
    main_ok(words)
    (tmp_path / "here/manifest.json").unlink()
    summary = tmp_path / "here/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"device": "\x1b]0;title\x07[red]"}))
    capsys.readouterr()
    main_ok([*words, "--resume"])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"on \x1b]0;title\x07[red]" in said


def test_a_run_is_extended_by_one_key(workplace, tmp_path, capsys):
    main_ok(["run", "--preset", "digits", "model=mlp", "rounds=2", "algorithm=feddyn", "--out", "here"])
    main_ok(["run", "--out", "here", "--resume", "rounds=4"])
    summary = json.loads((tmp_path / "here/summary.json").read_text())
    assert (summary["config"]["rounds"], summary["config"]["algorithm"], summary["extended"]) == (4, "feddyn", [2])


def test_verify(workplace, tmp_path, capsys):
    main_ok(["sweep", "--preset", "digits", "model=mlp", "rounds=2", "seed=0,1,2", "--out", "runs"])
    main_ok(["results", "runs", "--out", "runs/all.jsonl"])
    capsys.readouterr()
    main_ok(["verify", "runs", "runs/all.jsonl"])
    assert capsys.readouterr().out == "5 of 5 runs and files are as they were written\n"
    (tmp_path / "runs/seed0/manifest.json").unlink()
    main_ok(["verify", "runs"])
    old = "not checked, as earlier versions wrote no checksums: runs/seed0"
    assert capsys.readouterr().out == f"3 of 4 runs and files are as they were written\n{old}\n"
    for name in ("seed1/rounds.jsonl", "seed2/model.safetensors", "all.jsonl"):
        path = tmp_path / "runs" / name
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "runs"])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("0 of 4 runs and files are as they were written\nnot checked")
    assert captured.err.splitlines() == [
        "fedman: error: 3 damaged",
        "runs/seed1/rounds.jsonl: damaged (its sha256 is not the one in manifest.json)",
        "runs/seed2/model.safetensors: damaged (its sha256 is not the one in manifest.json)",
        "runs/all.jsonl: line 3: damaged (no checksum, which other lines have)",
    ]
    assert "damaged: no runs, results or measurements here" in refused(capsys, ["verify", "damaged"])
    assert "nothing: no such file or folder" in refused(capsys, ["verify", "nothing"])


def test_divergence_has_its_own_code(workplace, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--preset", "digits", "model=mlp", "rounds=1", "lr=1e30", "clip=inf"])
    assert stopped.value.code == 3
    assert "diverged: round 1" in capsys.readouterr().err


def test_run_and_sweep_from_the_command_line(workplace, tmp_path, capsys):
    main_ok(["run", "--preset", "digits", "model=mlp", "rounds=2", "algorithm=feddyn"])
    out = capsys.readouterr()
    assert "FedDyn+MAN: all " in out.out
    assert "round 2/2" in out.err
    summary = json.loads((tmp_path / "runs/digits-dir0.3-feddyn-zeta0.05-seed0/summary.json").read_text())
    assert summary["config"]["alpha"] == 0.01
    main_ok(["sweep", "--preset", "digits", "model=mlp", "rounds=2", "zeta=0,0.15", "seed=0,1", "--out", "grid"])
    table = capsys.readouterr().out
    assert "gain" in table
    assert "FedAvg" in table
    assert (tmp_path / "grid/table.md").read_text().startswith("| method | plain | +MAN ζ=0.15 | gain |")


def test_list_names_everything(capsys):
    main_ok(["list"])
    out = capsys.readouterr().out
    for word in ("feddc", "alpha=0.01", "tiny-imagenet-iid", "resnet18_gn", "checkpoint_seconds"):
        assert word in out


def test_help_starts_at_once_and_without_torch():
    code = "import sys; from fedman.cli.commands import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"

    def spent():  # by the child on a processor: a busy machine does not count
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    seconds = []
    for _ in range(3):
        started = spent()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(spent() - started)
    assert min(seconds) < 1.5  # 0.3 on a core of its own, 0.5 on a busy one; torch alone would take 2.5


def test_keys_are_checked_without_reading_what_packages_announce():
    code = """if True:
        import sys
        from fedman.cli.commands import main

        opened = []
        sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
        try:
            main(["run", "rounds=x"])
        except SystemExit as stopped:
            assert stopped.code == 2
        assert not [path for path in opened if path.endswith("entry_points.txt")]
        assert "numpy" not in sys.modules
    """
    env = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("fedman.backends.in_process", {"pydantic", "typer", "rich", "fedman.config"}),
        ("fedman.runs.sweep", {"typer", "rich", "fedman.paper", "fedman.cli"}),
        ("fedman.api", {"typer", "rich", "fedman.cli"}),
        ("fedman.cli.commands", {"importlib.metadata", "pydantic", "numpy", "rich"}),
    ],
)
def test_what_the_library_does_not_import(module, others):
    code = f"import sys, {module}; assert not {others} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_help_explains_arguments(capsys):
    main_ok(["results", "--help"])
    assert "folders of runs, or results files" in capsys.readouterr().out


def test_the_command_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "fedman", "--help"], check=True, capture_output=True, text=True)
    for algorithm in ALGORITHMS.values():
        assert algorithm.title in done.stdout


def test_version_and_the_names_a_shell_completes(capsys, monkeypatch):
    from fedman.runs.version import version

    main_ok(["--version"])
    assert capsys.readouterr().out == f"fedman {version()}\n"
    for name, value in {"COMPLETE": "complete_bash", "WORDS": "fedman sweep --preset paper-c", "CWORD": "3"}.items():
        monkeypatch.setenv(f"{'_FEDMAN_' if name == 'COMPLETE' else 'COMP_'}{name}", value)
    monkeypatch.setattr(sys, "argv", ["fedman"])
    main_ok(None)
    assert capsys.readouterr().out.split() == ["paper-cifar100", "paper-cifar10"]


def test_a_sweep_says_which_runs_are_left_and_plays_only_those(workplace, tmp_path, capsys, monkeypatch):
    words = ["sweep", "--preset", "digits", "model=mlp", "rounds=1", "zeta=0,0.15", "seed=0,1"]
    monkeypatch.setattr("fedman.runs.run_under_way.source", lambda: {"commit": "a", "changed": False})
    main_ok([*words[:-1], "seed=0", "--out", "there"])
    main_ok(["results", "there", "--out", "kept/mine.jsonl", "--committed"])
    capsys.readouterr()
    main_ok([*words, "--out", "here", "--done", "kept", "--left"])
    said = capsys.readouterr()
    assert said.out == "zeta0-seed1\nzeta0.15-seed1\n"
    assert "2 of 4 runs are done already" in said.err
    assert not (tmp_path / "here").exists()
    main_ok([*words, "--out", "here", "--done", "kept"])
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["table.md", "zeta0-seed1", "zeta0.15-seed1"]
    table = capsys.readouterr().out
    assert table.count("±") >= 2
    main_ok([*words[:-1], "seed=0", "--out", "nothing", "--done", "kept/mine.jsonl"])
    assert capsys.readouterr().out
    assert (tmp_path / "nothing/table.md").exists()
    assert "kept/no: no such file or folder" in refused(capsys, [*words, "--done", "kept/no"])
