"""Where the code of a run comes from: a commit, changed or not, an archive of one, a release, or nobody knows."""

import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

import pytest

import fedman
from fedman.errors import UserError
from fedman.runs import results, version
from fedman.runs.records import is_explained
from tests.runs.run_records import ROW

STORED = Path(__file__).parents[2] / "results"
GIT = shutil.which("git")


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, "-C", str(folder), *words], capture_output=True, check=True)
    return done.stdout.decode(errors="replace").strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository whose folder `package` is taken for ours."""
    if not GIT:
        pytest.skip("no git")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(version, "ROOT", package)
    return package


def source():
    return version.source.__wrapped__()


def test_a_checkout_names_its_commit_and_whether_the_package_is_changed(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout.parent / "runs").mkdir()
    (checkout.parent / "runs/summary.json").touch()  # elsewhere in the checkout: no change of the code
    assert source() == {"commit": commit, "changed": False}
    (checkout / "new.py").touch()
    assert source() == {"commit": commit, "changed": True}
    (checkout / "new.py").unlink()
    (checkout / "__init__.py").write_text("x = 1\n")
    assert source() == {"commit": commit, "changed": True}


def test_what_pip_has_installed_within_another_checkout(checkout, monkeypatch):
    """A release; a commit, where pip was given one; nothing that is known, where it was given a folder."""
    installed = checkout.parent / ".venv/fedman"
    about = installed.with_name("fedman-1.2.3.dist-info")
    for folder in (installed, about):
        folder.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fedman\nVersion: 1.2.3\n")
    (about / "RECORD").touch()
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.setattr(version, "ROOT", installed)
    assert source() == {"release": "1.2.3"}
    origin = about / "direct_url.json"
    origin.write_text('{"url": "https://a/b", "vcs_info": {"vcs": "git", "commit_id": "abc"}}')
    assert source() == {"commit": "abc"}
    origin.write_text('{"url": "file:///a/b", "dir_info": {}}')
    assert source() == {"unknown": "installed from a folder or a file"}
    copied = checkout.parent / "copy/fedman"
    copied.mkdir(parents=True)
    monkeypatch.setattr(version, "ROOT", copied)  # not the package that is installed
    assert source() == {"unknown": "neither a checkout nor installed"}


def test_notes_beside_a_checkout_are_not_those_of_a_release(tmp_path, checkout, monkeypatch):
    """`pip install -e` leaves them in `src`; a copy of it without git has them too."""
    about = checkout.parent / "fedman.egg-info"
    about.mkdir()
    (about / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: fedman\nVersion: 1.2.3\n")
    package = checkout.rename(checkout.with_name("fedman"))
    git(package.parent, "add", "fedman")
    git(package.parent, "commit", "-qam", "moved")
    monkeypatch.setattr(version, "ROOT", package)
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "__init__.py").write_text("x = 1\n")
    assert source() == {"commit": git(package, "rev-parse", "HEAD"), "changed": True}
    shutil.rmtree(package.parent / ".git")
    assert "unknown" in source()


def test_an_archive_names_its_commit_and_a_missing_git_is_said(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))
    assert source() == {"unknown": "git cannot be run: No such file or directory"}
    monkeypatch.setattr(version, "ARCHIVED", checkout / "commit.txt")
    (checkout / "commit.txt").write_text("$Format:%H$\n")
    assert "unknown" in source()
    (checkout / "commit.txt").write_text("a" * 40 + "\n")
    assert source() == {"commit": "a" * 40}


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ({"commit": "a", "changed": False}, True),
        ({"commit": "a"}, True),
        ({"release": "1"}, True),
        ({"commit": "a", "changed": True}, False),
        ({"unknown": "no git"}, False),
        (None, False),
    ],
)
def test_rows_that_no_commit_explains_are_named_or_refused(tmp_path, monkeypatch, source, known):
    row = ROW if source is None else ROW | {"source": source}
    out = tmp_path / "all.jsonl"
    assert is_explained(row) is known
    monkeypatch.setattr(results, "load", lambda place: [row])
    if not known:
        with pytest.raises(UserError, match=r"all\.jsonl: not written; no commit has the code of fedavg ζ=0, d iid, "):
            results.command([tmp_path], out, False, committed=True)
        assert not out.exists()
    assert ("no commit has the code of" in results.command([tmp_path], out, False, committed=known)) is not known
    assert results.read(out)[0].get("source") == source


def test_a_run_says_where_its_code_is(tmp_path):
    summary = fedman.run(model="mlp", clients=3, rounds=1, epochs=1, participation=0.4, out=tmp_path).summary
    assert summary["source"] == version.source()


def test_the_stored_results_name_commits_that_have_their_code():
    """`version` ends in a hash of the package's source, which the commit must have, and results/README.md lists both;
    no run has two results in one folder."""
    rows = []
    for folder in (STORED, STORED / "field"):
        parts = [(path.name, results.read(path)) for path in sorted(folder.glob("*.jsonl"))]
        rows += (joined := results.join(parts))
        assert len(joined) == sum(len(found) for _, found in parts)
    named = {(row["version"][-12:], row["source"]["commit"]) for row in rows if is_explained(row)}
    of_runs = (STORED / "README.md").read_text(encoding="utf-8").partition("| measurements |")[0]
    listed = re.findall(r"^\| `(\w{12})` \| (\w{7}) \|", of_runs, re.MULTILINE)
    assert {(code, commit[:7]) for code, commit in named} == set(listed)
    for expected, commit in named:
        if subprocess.run(["git", "-C", STORED, "cat-file", "-e", commit], capture_output=True).returncode:
            pytest.skip("without the history")
        archive = subprocess.run(["git", "-C", STORED.parent, "archive", commit, "src/fedman"], capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            code = {PurePosixPath(m.name): files.extractfile(m).read() for m in files if m.name.endswith(".py")}
        found = hashlib.sha256()
        for path in sorted(code):
            found.update(str(path.relative_to("src/fedman")).encode() + b"\0" + code[path])
        assert found.hexdigest()[:12] == expected, commit
