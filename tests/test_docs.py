"""What the documents print runs as printed."""

import importlib
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from docs import first_hour

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REGULARISER, FEDERATION = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "code",
    [pytest.param(REGULARISER, id="regulariser"), pytest.param(FEDERATION, id="federation", marks=pytest.mark.slow)],
)
def test_readme_python(code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_readme_commands_exist():
    """The make targets and every `fedman` command line of the README parse."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
    from fedman.paper.presets import find_sweep
    from fedman.runs.grid import cells
    from fedman.runs.key_text import overrides

    lines = re.findall(r"^fedman (?:run|sweep) (.*?)(?:  #.*)?$", README, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        preset = words[words.index("--preset") + 1]
        assert cells(overrides(w for w in words if "=" in w), find_sweep(preset))


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "results/README.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_runs_that_are_printed_together_have_folders_of_their_own():
    """A folder is named after data, algorithm, ζ and seed alone, so that of several runs all but one name theirs."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = [line for line in re.findall(r"^fedman run (.*)$", block, re.MULTILINE) if "--resume" not in line]
            folders = [line.partition("--out ")[2].split(" ")[0] for line in lines]
            assert len(set(folders)) == len(folders), f"{page.name}: {lines}"


def test_algorithm_files_stay_short():
    for path in (ROOT / "src/fedman/algorithms").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100


ALGORITHMS_PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.fixture
def own_algorithm(tmp_path):
    """A folder with the page's file, as printed."""
    name = re.findall(r"The file `(\w+\.py)`", ALGORITHMS_PAGE)[0]
    (tmp_path / name).write_text(re.findall(r"```python\n(.*?)```", ALGORITHMS_PAGE, re.DOTALL)[0], encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_algorithm_of_the_page_runs_by_the_printed_command(own_algorithm):
    """In a process of its own, from the folder of the file, which is nowhere on the path."""
    (command,) = re.findall(r"```sh\nfedman (.*?)\n```", ALGORITHMS_PAGE)
    words = [sys.executable, "-P", "-m", "fedman", *command.split(), "clients=4", "epochs=1", "--out", "out"]
    done = subprocess.run(words, cwd=own_algorithm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((own_algorithm / "out/summary.json").read_text())
    assert (summary["method"], summary["config"]["algorithm"]) == ("FedAvgM", "fedavgm:FedAvgM")
    assert (summary["config"]["beta"], summary["config"]["rounds"]) == (0.9, 2)
    again = subprocess.run([*words[:4], "run", "--out", "out", "--resume"], cwd=own_algorithm, capture_output=True)
    assert again.returncode == 0, again.stderr


def test_the_algorithm_of_the_page_is_right(own_algorithm, monkeypatch):
    """Without momentum it is FedAvg; with it the models differ. By name or as an instance, as the page has it."""
    import fedman

    monkeypatch.chdir(own_algorithm)
    monkeypatch.syspath_prepend(own_algorithm)
    FedAvgM = importlib.import_module("fedavgm").FedAvgM
    assert "`fedman.run(algorithm=FedAvgM(beta=0.9))`" in ALGORITHMS_PAGE
    keys = {"clients": 4, "participation": 0.5, "rounds": 3, "epochs": 1}
    plain = fedman.run(**keys).models["cloud"]
    for beta, same in ((0.0, True), (0.9, False)):
        w = fedman.run(algorithm="fedavgm:FedAvgM", beta=beta, **keys).models["cloud"]
        assert all(w[name].allclose(plain[name], atol=1e-5) for name in plain) is same
    given = fedman.run(algorithm=FedAvgM(beta=0.9), **keys).models["cloud"]
    assert all(given[name].equal(w[name]) for name in w)


def test_the_page_says_how_long_its_algorithm_is(own_algorithm):
    """Lines that are not empty."""
    lines = [line for line in (own_algorithm / "fedavgm.py").read_text().splitlines() if line]
    assert f"in {len(lines)} lines" in ALGORITHMS_PAGE


def test_the_page_of_algorithms_names_what_exists():
    from fedman.algorithms import ALGORITHMS, Algorithm

    page = ALGORITHMS_PAGE
    assert set(re.findall(r"^\| `([\w-]+)` \| .*(?:w|Fed)", page, re.MULTILINE)) >= set(ALGORITHMS)
    rows = re.findall(r"^\| (`.*?) \|", page.split("What an algorithm can define")[1], re.MULTILINE)
    public = {name for name in {**vars(Algorithm), **Algorithm.__annotations__} if not name.startswith("_")}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == public
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path


def test_coming_from_is_short_and_its_commands_parse():
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    assert [section.split("\n")[0] for section in sections] == [
        "Flower", "pfl-research", "FL-bench", "PFLlib", "PyHessian",
    ]  # fmt: skip
    for block in re.findall(r"```(?:py|bash|sh|python)\n(.*?)```", page, re.DOTALL):
        assert len(block.splitlines()) <= 10
    from fedman.config import resolve
    from fedman.data import lookup
    from fedman.runs.key_text import overrides

    for line in re.findall(r"^fedman run (.*)$", page, re.MULTILINE):
        assert resolve(overrides(word for word in line.split(" --")[0].split()))
    for name in re.findall(r"^fedman data get (.*)$", page, re.MULTILINE):
        assert lookup(name).files


@pytest.mark.slow
@pytest.mark.parametrize(("page", "printed"), [("running", "FedDyn+MAN on digits"), ("flatness", "2 tensor(")])
def test_a_page_runs_as_printed(page, printed, tmp_path):
    """All its Python, as one script, in an empty folder."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.slow
def test_coming_from_runs_as_printed(tmp_path):
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FedAvg") == 2


HOW_TO = (ROOT / "docs/how-to.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_how_to_runs_as_printed(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *methods, clients = done.stdout.splitlines()
    assert [line.split()[0] for line in methods] == ["FedAvg", "FedAvg+MAN", "FedDyn", "FedDyn+MAN"]
    assert re.findall(r"'(\w+)': [\d.]+", clients) == ["ann", "bob", "eve"]


def options_of(command):
    """The options of a subcommand of `fedman`, `data get` among them."""
    from typer.main import get_command

    from fedman.cli.commands import app

    group = get_command(app)
    for word in command.split():
        group = group.commands[word]
    return {option for each in group.params for option in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_options_that_a_page_prints_exist(page):
    commands = "run|sweep|tune|results|report|flatness|verify|data get|data show|flower simulate"
    for command, words in re.findall(rf"fedman ({commands})\b([^`|#\n]*)", page.read_text(encoding="utf-8")):
        options = {word.partition("=")[0] for word in words.split() if re.match(r"--\w", word)}
        if page.name != "first-hour.md":  # which has mistakes on purpose
            assert options <= options_of(command), (command, words)


def test_every_public_name_is_in_the_api_reference():
    import fedman

    page = (ROOT / "docs/site/api.md").read_text(encoding="utf-8")
    named = re.findall(
        r"^\.\. auto(?:class|function|exception):: (\w+)$", page.split("## `fedman.data`")[0], re.MULTILINE
    )
    assert sorted(named) == sorted(set(fedman.__all__) - {"__version__", "data"})


def test_the_page_of_the_first_hour_lists_all_actions():
    assert len(first_hour.ACTIONS) == 30
    assert {action.kind for action in first_hour.ACTIONS} == {"install", "run", "read", "break", "extend", "measure"}
    *head, _, _ = first_hour.HEAD.splitlines()
    lines = first_hour.PAGE.read_text(encoding="utf-8").splitlines()
    assert lines[: len(head)] == head
    for action, line in zip(first_hour.ACTIONS, lines[len(head) + 2 :], strict=True):
        assert line.startswith(first_hour.row(action))
        assert re.search(action.says, line.rsplit(" | ", 1)[1].strip("`| "))


@pytest.mark.slow
def test_the_first_hour(tmp_path):
    """The actions that need no torch end as expected; `make first-hour` plays them all."""
    first_hour.prepare(tmp_path)
    for action in (action for action in first_hour.ACTIONS if action.quick):
        printed, wrong = first_hour.play(action, tmp_path, Path(sys.executable))
        assert not wrong, f"{action.command}: {wrong}\n{printed}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    words = ["sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs/site", ".", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "url=README.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    reference = (tmp_path / "docs/site/api.html").read_text(encoding="utf-8")
    for name in ("fedman.run", "fedman.ActivationNorm", "fedman.data.load", "fedman.flatness.hutchpp"):
        assert f'id="{name}"' in reference
    assert "hutchpp" in (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text(encoding="utf-8")
        )
        assert not fetched, page


def printed_commands(page, verb):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^fedman {verb} (.*?)(?: +# (\d+).*)?$", text, re.MULTILINE)


def test_the_page_on_running_names_all_keys_of_execution_and_all_sweeps():
    from typing import get_args

    from fedman.config import KEYS
    from fedman.paper.presets import SWEEPS

    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/running.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert named >= set(SWEEPS) | set(get_args(KEYS["execution"].annotation)) - {"auto"}


def test_tunings_of_the_pages_are_as_printed():
    from fedman.cli.sweeps import _rounds, _words
    from fedman.paper.presets import find_sweep
    from fedman.runs import results, sweep
    from fedman.runs.grid import cells
    from fedman.runs.key_text import overrides
    from fedman.runs.tune import plan

    lines = [*printed_commands("running.md", "tune"), *printed_commands("field.md", "tune")]
    assert len(lines) == 4
    for line, runs in lines:
        words = line.split()
        options = {w: words[i + 1] for i, w in enumerate(words) if w.startswith("--")}
        grid = cells(
            {"validation": 0.1, **overrides(w for w in words if "=" in w)}, find_sweep(options.get("--preset"))
        )
        assert plan(grid, _words("each", options.get("--each", "")), _rounds(options.get("--rungs", "")))
        assert not runs or len(grid) == int(runs)
    for line, runs in printed_commands("field.md", "sweep"):
        words = line.split()
        if "--preset" in words:
            grid = cells(overrides(w for w in words if "=" in w), find_sweep(words[words.index("--preset") + 1]))
            papers = results.read(ROOT / "results/cifar100.jsonl") if "--done" in words else []
            assert len(grid) - len(sweep.recorded(grid, papers)) == int(runs)


def test_the_fields_page_has_the_small_study_as_its_rows_say():
    from fedman.algorithms import ALGORITHMS
    from fedman.runs import results
    from fedman.runs.records import headline
    from fedman.runs.text_tables import mean_std

    values = {}
    for row in results.read(ROOT / "benchmarks/field_digits.jsonl"):
        assert (row["source"]["commit"][:7], row["source"]["changed"]) == ("dfc4a48", False)
        key = row["config"]["algorithm"], bool(row["config"]["zeta"])
        values.setdefault(key, {})[row["config"]["seed"]] = headline(row)
    assert {(*seeds,) for seeds in values.values()} == {(0, 1, 2)}
    page = (ROOT / "docs/field.md").read_text(encoding="utf-8")
    gains, mean = {}, {key: statistics.fmean(seeds.values()) for key, seeds in values.items()}
    for name, kind in ALGORITHMS.built_in.items():
        plain, man = (mean_std([*values[name, penalised].values()], ".2f") for penalised in (False, True))
        gains[name] = mean[name, True] - mean[name, False]
        gain = f"{gains[name]:+.2f}".replace("-", "−")
        assert f"| {kind.title} | {plain} | {man} | {gain} |" in page
    assert f"MAN raises {sum(gain > 0.005 for gain in gains.values())} of 18 means" in page
    assert sorted(gains, key=gains.get)[-3:] == ["fedprox", "fedlesam", "fedavg"]
    assert {name for name, gain in gains.items() if gain < 0.005} == {
        "fedasam", "feddc", "scaffold", "fedgamma", "fedsmoo", "fedgloss",
    }  # fmt: skip
    others = [mean[name, False] for name in gains if name != "fedavg"]
    assert min(others) >= mean["fedavg", False]
    assert f"by up to {max(others) - mean['fedavg', False]:.1f} points" in page
    ahead = sum(mean["fedavg", True] > each for each in others)
    assert f"FedAvg+MAN is ahead of {ahead} of the 17 others" in page
    assert max(mean, key=mean.get) == ("fedacg", True)


def test_the_fields_page_names_what_was_tried():
    from fedman.algorithms import ALGORITHMS
    from fedman.paper.presets import TUNED

    page = (ROOT / "docs/field.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1]: line for line in page.splitlines() if line.startswith("| ") and "`" in line}
    for name, tried in TUNED.items():
        (line,) = [line for first, line in rows.items() if ALGORITHMS[name].title in re.split(r"[;, ]+", first)]
        assert all(f"`{key}`" in line for key in tried)
        assert all(value in line for key, values in tried.items() if key != "decayed" for value in values)
