"""The ServerApp: bad input ends with its exit code and reason; the project that `flwr run` sends."""

import json
import threading

import pytest
from flwr.app import Context, RecordDict

from fedman.errors import UserError
from fedman.flower import app
from fedman.flower.app import Failed, main, new_project
from tests.flower.local_grid import LocalGrid


def start(out, grid=None, **config):
    given = {"preset": "", "settings": "", "out": str(out), "resume": False, **config}
    main(grid or LocalGrid({}), Context(1, 1, {}, RecordDict(), given))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("dataset=digits quorum=2", "exit 2: quorum: should be less than or equal to 1, not '2'"),
        ("dataset='digits", "exit 2: settings: .* is not a list of words"),
        ("dataset=digits", "exit 2: .*: holds a run already"),
    ],
)
def test_bad_input_is_shown_and_writes_nothing(settings, message, tmp_path):
    """Not even into the folder of another run, which may go on or be done."""
    for name in ("config.toml", "failed.json"):
        (tmp_path / name).touch()
    with pytest.raises(Failed, match=message):
        start(tmp_path, settings=settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "failed.json"]


def test_a_folder_that_cannot_be_used_is_bad_input(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Failed, match=r"exit 2: .*/file: cannot be written: File exists"):
        start(tmp_path / "file", settings="dataset=digits")
    with pytest.raises(Failed, match=r"exit 2: .*/empty: holds no run that could be resumed"):
        start(tmp_path / "empty", resume=True)


def test_a_failure_is_shown_and_recorded_with_its_exit_code(tmp_path):
    with pytest.raises(Failed, match=r"exit 4: 0 of 2 clients are there after 0.1 s; missing: 0, 1") as error:
        start(tmp_path, settings="dataset=digits clients=2 wait=0.1")
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert str(error.value) == f"exit {failed['exit']}: {failed['reason']}"
    settings = "dataset=digits clients=2 participation=1 epochs=1 rounds=1"
    start(tmp_path, LocalGrid.of(2, tmp_path / "memory"), settings=settings)
    assert not (tmp_path / "failed.json").exists()


def test_a_run_prints_a_line_per_round(tmp_path, capsys):
    grid = LocalGrid.of(2, tmp_path / "memory")
    settings = "dataset=digits clients=2 participation=1 epochs=1 rounds=2"
    start(tmp_path / "out", grid, settings=settings)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0][:13] for line in lines] == ["round 1: loss", "round 2: loss"]
    assert all(" %" in line for line in lines)


def test_a_run_that_does_not_end_after_a_signal_is_ended(monkeypatch):
    """For calls to a SuperLink that is gone, which Flower repeats for ever."""
    codes, stop = [], threading.Event()
    monkeypatch.setattr(app.os, "_exit", codes.append)
    monkeypatch.setattr(app, "GRACE", 0.0)
    waiting = threading.Thread(target=app._end_hard, args=[stop])
    waiting.start()
    assert codes == []
    stop.set()
    waiting.join()
    assert codes == [1]


def test_the_project_is_written_to_a_new_folder_only(tmp_path):
    new_project(tmp_path / "app")
    assert sorted(p.name for p in (tmp_path / "app").iterdir()) == ["client_app.py", "pyproject.toml", "server_app.py"]
    with pytest.raises(UserError, match="app: cannot be made: File exists"):
        new_project(tmp_path / "app")
