"""The packages: what is in them, whether they are well formed, and whether the tests run from the source archive."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRACKED = ("src", "tests", "docs", "examples", "faults", "notebooks", "results", "benchmarks", ".ci")

pytestmark = pytest.mark.slow


def run(*words, cwd):
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive made from a copy of this tree, and the wheel made from that archive."""
    import shutil

    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for path in (p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"):
        shutil.copy(path, tree)
    for name in TRACKED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run("build", "--no-isolation", "--outdir", str(dist), cwd=tree)
    return dist


def test_the_packages_are_well_formed(built):
    files = [str(path) for path in built.iterdir()]
    assert len(files) == 2
    run("twine", "check", "--strict", *files, cwd=built)
    run("check_wheel_contents", *(file for file in files if file.endswith(".whl")), cwd=built)


def test_the_wheel_holds_the_package_and_all_its_data(built):
    (wheel,) = built.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    suffixes = {".py", ".gz", ".json", ".md", ".html", ".css", ".js", ".toml", ".typed"}
    here = {str(p.relative_to(source)) for p in (source / "fedman").rglob("*") if p.suffix in suffixes}
    assert inside == here | ({"fedman/py.typed"} & inside)


def test_the_tests_run_from_the_source_archive(built, tmp_path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py")} <= {
        str(p.relative_to(tree)) for p in tree.rglob("*.py")
    }
    listed = run("pytest", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=tree)
    assert "error" not in listed.splitlines()[-1]
    run(
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/test_docs.py::test_links_lead_somewhere",
        "tests/optimizers",
        cwd=tree,
    )
