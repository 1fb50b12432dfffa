"""Small versions of the official data sets, so that the real loaders read real files within milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.data_bad_files import Sandbox, shrink


@pytest.fixture(autouse=True)
def own_data_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test looks into the user's data folder."""
    folder = tmp_path_factory.mktemp("default-data-dir")
    monkeypatch.setenv("FEDMAN_DATA", str(folder))
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue with the counts of small files."""
    shrink(monkeypatch)


@pytest.fixture
def sandbox(tmp_path: Path, own_data_dir: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A folder for bad files; a hostile pickle that is run leaves a canary there."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    return Sandbox(tmp_path, own_data_dir)
