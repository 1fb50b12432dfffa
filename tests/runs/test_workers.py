"""A sweep played by several processes or on a Ray cluster ends with the same bits, whoever dies on the way."""

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fedman.cli.commands import main
from fedman.errors import UserError
from fedman.runs import workers
from fedman.runs.folder import RunFolder
from fedman.runs.grid import cells
from fedman.runs.workers import Processes, Stack, play_all

HAS_RAY = importlib.util.find_spec("ray") is not None

WORDS = ["dataset=digits", "clients=6", "participation=0.5", "epochs=1", "seed=0,1", "checkpoint_seconds=0.2"]
LONG = [*WORDS, "algorithm=fedavg,feddyn"]
ROUNDS = {"cpu": "rounds=100", "cuda": "rounds=2000"}


def start(*words, out, device="cpu"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["sweep", *words, ROUNDS[device], "--out", out, "--device", device]
    command = [Path(sys.executable).parent / "fedman", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def descendants(pid, name):
    """The processes below a sweep whose command line has `name`, by now."""
    parents, named = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if name in (entry / "cmdline").read_bytes():
                    named.append(int(entry.name))
            except (OSError, IndexError):
                continue

    def descends(each):
        return each == pid or (each in parents and descends(parents[each]))

    return [each for each in named if descends(each)]


def alive(pid):
    """Whether a process is there and has not ended; one that was left to nobody may stay listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def wait_for(condition, process, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def checkpointed(out):
    """The runs that have a checkpoint of a round."""
    return [path.parent.parent for path in Path(out).glob("*/checkpoint/round-*[1-9]*.json")]


def assert_same(there, here):
    """Models and records, but for the time they took."""
    names = sorted(run.name for run in here.iterdir() if run.is_dir())
    assert names == sorted(run.name for run in there.iterdir() if run.is_dir())
    for name in names:
        a, b = RunFolder(there / name), RunFolder(here / name)
        for model, values in a.read_models().items():
            assert all(torch.equal(v, b.read_models()[model][k]) for k, v in values.items())
        plain = [[{k: v for k, v in r.items() if k != "seconds"} for r in each.read_rounds()] for each in (a, b)]
        assert plain[0] == plain[1]


@pytest.fixture(
    scope="module",
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def device(request):
    """Where a sweep is played; workers share the one GPU."""
    return request.param


@pytest.fixture(scope="module")
def alone(device, tmp_path_factory):
    """The long sweep, played in this process: stacks of two runs as two workers have them."""
    out = tmp_path_factory.mktemp("alone") / "sweep"
    with pytest.raises(SystemExit) as end:
        main(["sweep", *LONG, ROUNDS[device], "--out", str(out), "--device", device, "--workers", "1"])
    assert end.value.code == 0
    return out


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(device, alone, tmp_path):
    out = tmp_path / "sweep"
    process = start(*LONG, "--workers", "2", out=out, device=device)
    wait_for(lambda: len(set(checkpointed(out))) == 4, process)
    victims = descendants(process.pid, b"spawn_main")
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    os.kill(victims[1], signal.SIGTERM)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert_same(out, alone)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_no_process_and_goes_on(signum, device, alone, tmp_path):
    out = tmp_path / "sweep"
    process = start(*LONG, "--workers", "2", out=out, device=device)
    wait_for(lambda: len(set(checkpointed(out))) == 4, process)
    workers = descendants(process.pid, b"spawn_main")
    os.kill(process.pid, signum)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), stderr
    assert "Traceback" not in stderr
    end = time.monotonic() + 60
    while any(map(alive, workers)):
        assert time.monotonic() < end
        time.sleep(0.1)
    again = start(*LONG, "--workers", "2", out=out, device=device)
    _, stderr = again.communicate(timeout=600)
    assert again.returncode == 0, stderr
    assert_same(out, alone)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_on_a_ray_cluster_the_same(device, alone, tmp_path):
    """A cluster on this machine; one of its workers is killed while it plays."""
    out = tmp_path / "sweep"
    process = start(*LONG, "--ray", "local", out=out)
    wait_for(lambda: len(set(checkpointed(out))) == 4, process)
    victims = descendants(process.pid, b"ray::_play")
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert_same(out, alone)
    assert not list(out.glob(".shared-*"))


@pytest.mark.slow
def test_shards_joined_are_the_whole(device, alone, tmp_path, capsys):
    """One of them is killed while it plays; its command is then repeated."""
    parts = [tmp_path / f"part-{i}" for i in (1, 2)]
    process = start(*LONG, "--shard", "1/2", "--workers", "1", out=parts[0], device=device)
    wait_for(lambda: len(set(checkpointed(parts[0]))) == 2, process)
    process.kill()
    process.communicate()
    assert not list(parts[0].glob("*/summary.json"))
    for i, part in enumerate(parts, 1):
        words = ["--shard", f"{i}/2", "--out", str(part), "--device", device, "--workers", "1"]
        with pytest.raises(SystemExit):
            main(["sweep", *LONG, ROUNDS[device], *words])
    assert [len(list(part.glob("*/summary.json"))) for part in parts] == [2, 2]
    with pytest.raises(SystemExit) as end:
        main(["sweep", "--merge", *map(str, parts), "--out", str(tmp_path / "all")])
    assert end.value.code == 0
    assert_same(tmp_path / "all", alone)


class Dying(Processes):
    """Workers of which none lives."""

    def _begin(self, stack, place, lives):
        self.begun = [*getattr(self, "begun", []), lives]
        super()._begin(stack, place, lives)


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_workers_that_always_die_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_work", dies)
    grid = cells({"dataset": "digits", "rounds": "2"})
    places = Dying(2, "cpu")
    with pytest.raises(UserError, match="4 processes died over it, the last of signal 9; is memory short"):
        play_all([Stack(tuple(grid), tmp_path)], places, {cell.name: print for cell in grid}, print)
    assert places.begun == [4, 3, 2, 1]


class InThread(threading.Thread):
    """A worker that no signal reaches."""

    pid = None


def test_a_stopped_worker_with_much_to_say_ends(tmp_path):
    """Its answer is longer than a pipe holds: it ends only once that is read."""
    answer, theirs = multiprocessing.Pipe(duplex=False)
    talking = InThread(target=theirs.send, args=(["a warning"] * 100_000,), daemon=True)
    talking.start()
    places = Processes(2, "cpu")
    places._running.append(workers._Worker(Stack((), tmp_path), 0, talking, answer, 1))
    stopping = threading.Thread(target=places.stop, args=(signal.SIGTERM,), daemon=True)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive()
    places.close()
    assert answer.closed


def test_progress_is_read_from_the_folder(tmp_path):
    seen = []
    file = tmp_path / "rounds.jsonl"
    file.write_text('{"round": 1}\n')
    watch = workers._Watch(file, seen.append)
    watch.poll()
    assert seen == []
    with file.open("a") as lines:
        lines.write('{"round": 2}\n{"rou')
    watch.poll()
    assert seen == [{"round": 2}]
    with file.open("a") as lines:
        lines.write('nd": 3}\n')
    watch.poll()
    assert seen[1:] == [{"round": 3}]
    file.write_text(json.dumps({"round": 1}) + "\n")  # resumed from the first round
    watch.poll()
    with file.open("a") as lines:
        lines.write('{"round": 2}\n')
    watch.poll()
    assert seen[2:] == [{"round": 2}]
    other = tmp_path / "other"
    other.write_text('{"round": 1, "loss": 1.25}\n{"round": 2, "loss": 1.125}\n')  # longer, and its lines lie elsewhere
    other.replace(file)
    watch.poll()
    assert len(seen) == 3
    late = workers._Watch(tmp_path / "later.jsonl", seen.append)
    (tmp_path / "later.jsonl").write_text('{"round": 1}\n')
    late.poll()
    assert seen[3:] == [{"round": 1}]


def test_a_share_without_runs(tmp_path, capsys):
    """As jobs have that are more than runs."""
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["sweep", *WORDS, "--shard", "1/16", "--out", str(tmp_path / "out")])
    assert capsys.readouterr().err == "fedman: shard 1/16: nothing to do; the 2 runs are in other shares\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "0/4"], "error: --shard: '0/4' is not I/N with I from 1 to N, as in 3/16"),
        (["--shard", "5/4"], "error: --shard: '5/4' is not I/N"),
        (["--shard", "x"], "error: --shard: 'x' is not I/N"),
        (["--merge", "--shard", "1/2"], "error: --merge: name the folders to join and one to join them in"),
        (["--ray", "local", "--workers", "2"], "error: --workers: a Ray cluster has its own"),
        (["--ray", "127.0.0.1:1"], f"error: --ray: {'no cluster at' if HAS_RAY else 'Ray is not installed'}"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["sweep", *WORDS, *words, "--out", str(tmp_path / "out")])
    stderr = capsys.readouterr().err
    assert end.value.code == 2
    assert stderr.startswith(f"fedman: {message}"), stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
