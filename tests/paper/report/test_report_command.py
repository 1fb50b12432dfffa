"""The command: what it reads, what it writes, which input is an error."""

import json
import math
import re

import pytest

import fedman
from fedman.cli.commands import main
from tests.paper.report.report_rows import eigenvalues, estimate, flatness, pair, row, write


def run(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, words)])
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def test_a_folder_of_results_becomes_a_page_and_files(place, tmp_path, capsys):
    write(place / "a.jsonl", [*pair(40.0, 52.0), row(51.0, zeta=0.075), row(51.5, zeta=0.6)])
    write(place / "b.jsonl", [row(41.0, zeta=0), *pair(41.0, 53.0, seed=1)])
    (place / "run").mkdir()
    (place / "run" / "flatness.json").write_text(json.dumps(flatness()))
    (place / "cost.json").write_text(
        json.dumps({"steps": [{"where": "here", "model": "cifar_cnn", "kind": "SAM", "ms": 2.0, "ratio": 1.98}]})
    )
    out = tmp_path / "page.html"
    code, output, _ = run(capsys, place, "--out", out)
    assert code == 0
    first, second = output.splitlines()
    assert re.fullmatch(r"\S+page.html: 6 runs, \d+ pictures, \d+ tables, \d\.\d MB", first)
    assert second == f"not checked, as earlier versions wrote no checksums: {place}/a.jsonl and 2 more"
    page = out.read_text(encoding="utf-8")
    assert "b.jsonl: 1 run has another result elsewhere" in page
    assert "40.50 ± 0.71" in page
    assert "51.49" in page, "the paper's λ_max"
    assert "1.980" in page
    assert ">0.075</text>" in page, "a label of the ζ axis"
    assert ">10⁻³</text>" in page, "a label of the density's axis"
    assert "mathdefault" not in page
    assert not re.search(r'(?:src|href|url)\s*[=(]\s*["\']?(?:https?:)?//', page), "nothing from the network"
    linked = {tmp_path / link for link in re.findall(r'href="./(page_files/[^"]+)"', page)}
    assert linked
    assert all(path.exists() for path in linked)
    kinds = {path.suffix for path in (tmp_path / "page_files").rglob("*.*")}
    assert kinds == {".svg", ".png", ".csv", ".md"}
    before = page
    run(capsys, place, "--out", out)
    assert out.read_text(encoding="utf-8") == before, "the same input gives the same page"


def test_runs_on_the_embedded_data_and_a_single_run(tmp_path, capsys):
    for seed in (0, 1):
        for zeta in (0, 0.05):
            keys = {"clients": 5, "participation": 0.5, "rounds": 3, "epochs": 1, "zeta": zeta, "seed": seed}
            fedman.run(model="mlp", **keys, out=tmp_path / "runs" / f"z{zeta}s{seed}")
    assert run(capsys, tmp_path / "runs", "--out", tmp_path / "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Digits" in page
    assert ">paper<" not in page
    assert "digits-dir0.3-partition" in page
    code, output, _ = run(capsys, tmp_path / "runs" / "z0s0", "--out", tmp_path / "b.html")
    assert code == 0
    assert "1 runs" in output
    assert "not of this report" not in output
    names = [{path.name for path in (tmp_path / f"{page}_files").glob("*/*")} for page in "ab"]
    _, output, _ = run(capsys, tmp_path / "runs" / "z0s0", "--out", tmp_path / "a.html")
    assert f"a_files: {len(names[0] - names[1])} files not of this report" in output


def test_text_from_files_is_text_on_the_page(place, tmp_path, capsys):
    bad = "<script>alert(1)</script>\"'&$\\frac$"
    rows = pair(40.0, 52.0)
    for r in rows:
        r["config"] |= {"dataset": bad, "partition": bad, "algorithm": "../" + bad}
        r["device"] = bad
    write(place / "a.jsonl", rows)
    out = tmp_path / "deep" / "page.html"
    out.parent.mkdir()
    assert run(capsys, place, "--out", out)[0] == 0
    assert "<script>alert" not in out.read_text(encoding="utf-8")
    written = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert all(p.is_relative_to(out.parent) or p.parent == place for p in written), "no file outside its folder"


def test_diverged_runs_are_named_and_drawn_nowhere(place, tmp_path, capsys):
    rows = [row(math.nan, zeta=0), row(52.0), row(math.nan, zeta=0.3), row(51.0, zeta=0.6), row(math.nan, seed=1)]
    rows[0]["curve"] = {"round": [1, 2], "all": [1.0, 2.0]}
    write(place / "a.jsonl", rows)
    assert run(capsys, place, "--out", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Diverged: FedAvg, Dirichlet 0.3; FedAvg+MAN, Dirichlet 0.3." in page
    assert "NaN" not in page


def broken(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def changed(key, value):
    """A flatness.json with another value of one key."""
    return broken("flatness.json", json.dumps(flatness() | {key: value}))


GOOD = json.dumps(row(40.0, zeta=0)) + "\n"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "results: nothing to report"),
        (broken("a.jsonl", ""), "a.jsonl: is empty"),
        (broken("a.jsonl", GOOD + "{"), "a.jsonl: line 2: not a results file"),
        (broken("a.jsonl", GOOD + "\n"), "a.jsonl: line 2: not a results file"),
        (broken("a.jsonl", GOOD + '{"config": {}}\n'), "a.jsonl: line 2: config.dataset is missing"),
        (broken("a.jsonl", b"\xff\xfe\x00"), "a.jsonl: line 1: not a results file"),
        (broken("summary.json", "{"), "summary.json: not JSON"),
        (broken("summary.json", "{}"), "summary.json: config is missing"),
        (broken("flatness.json", "{"), "flatness.json: not a JSON file"),
        (broken("flatness.json", "[]"), "flatness.json: not measurements in format 1"),
        (broken("flatness.json", '{"format": 2}'), "flatness.json: not measurements in format 1"),
        (changed("run", {"method": "FedAvg"}), "flatness.json: run.dataset is missing"),
        (changed("run", flatness()["run"] | {"config": 3}), "flatness.json: run.config should be a JSON object, not 3"),
        (changed("models", {"all": {"top": {}}}), "flatness.json: models.all.top.values is missing"),
        (changed("models", {"all": {"top": eigenvalues([])}}), "flatness.json: models.all.top.values"),
        (changed("models", {"all": {"top": eigenvalues(["x"])}}), "flatness.json: models.all.top.values.0 should be"),
        (
            changed("models", {"all": {"density": {"nodes": "x"}}}),
            "flatness.json: models.all.density.nodes should be",
        ),
        (
            changed("models", {"all": {"density": {"nodes": [[0.0, 1.0], [0.0]], "weights": [[0.5, 0.5]] * 2}}}),
            "flatness.json: models.all.density must hold a weight for each node of each start",
        ),
        (changed("models", {"all": [3]}), "flatness.json: models.all should be a JSON object"),
        (broken("cost.json", '{"steps": [{"where": "here"}]}'), "cost.json: steps.0.model is missing"),
        (broken("cost.json", "{}"), "cost.json: steps is missing"),
        (
            broken("theory.json", '{"theorems": {"header": [1], "rows": []}}'),
            "theory.json: theorems.header.0 should be",
        ),
        (
            broken("theory.json", '{"theorems": {"header": ["a"], "rows": [["b", "c"]]}}'),
            "theory.json: theorems must have as many cells in every row as in the header",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(place, tmp_path, capsys, make, message):
    make(place)
    code, output, error = run(capsys, place, "--out", tmp_path / "page.html")
    assert code == 2
    assert output == ""
    assert message in error
    assert len(error.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["results"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["results", "--out", "page.pdf"], "--out: page.pdf must end in .html"),
        (["results", "--out", "results/a.jsonl/page.html"], "cannot be written"),
        ([], "Missing argument"),
    ],
)
def test_bad_arguments(place, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    write(place / "a.jsonl", pair(40.0, 52.0))
    code, _, error = run(capsys, *words)
    assert code == 2
    assert message in error


def test_what_was_not_finite_is_left_out(place, tmp_path, capsys):
    record = flatness()
    record["models"]["all"] |= {
        "top": eigenvalues([None, -1.0]),
        "trace": estimate(None),
        "landscape": {"seed": 0, "offsets": [-1.0, 1.0], "losses": [[None, 1.0], [2.0, None]]},
    }
    record["models"]["all"]["density"] |= {"nodes": [[None, 1.0], [0.0, None]], "weights": [[0.5, 0.5], [0.5, 0.5]]}
    (place / "flatness.json").write_text(json.dumps(record))
    code, output, _ = run(capsys, place, "--out", tmp_path / "page.html")
    assert code == 0
    assert "0 runs, 2 pictures" in output, "a surface and a map"


def test_runs_that_were_stopped_early_are_named(place, tmp_path, capsys):
    rows = pair(40.0, 52.0)
    rows[0] |= {"stopped": "plateau", "round": 20}
    write(place / "a.jsonl", rows)
    assert run(capsys, place, "--out", tmp_path / "x.html")[0] == 0
    tables = tmp_path / "x_files/tables"
    said = "1 run was stopped early, after round 20; the figures are those at the stop."
    assert said in (tables / "summary.md").read_text(encoding="utf-8")
    lines = (tables / "all-runs.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "| stopped after round 20 |" in line] == lines[4:5]


def test_one_results_file_is_enough(place, tmp_path, capsys):
    path = write(place / "a.jsonl", [row(40.0, zeta=0), row(41.0, zeta=0)])
    code, output, _ = run(capsys, path, "--out", tmp_path / "page.html")
    assert code == 0
    assert "1 runs" in output
    assert "a.jsonl: 1 run has another result elsewhere" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_on_samples_held_out_alone_are_said_to_be_left_out(place, tmp_path, capsys):
    held_out = row(40.0, zeta=0)
    held_out["config"]["validation"] = 0.1
    write(place / "a.jsonl", [held_out])
    code, _, message = run(capsys, place, "--out", tmp_path / "x.html")
    assert code == 2
    assert "nothing to report; 1 run was evaluated on samples held out from training, and not shown." in message
    write(place / "a.jsonl", [row(40.0, zeta=0, execution=how) for how in ("plain", "vmap")])
    assert run(capsys, place, "--out", tmp_path / "x.html")[0] == 0
    said = "1 run is not shown: others have the same setting and seed, apart from execution."
    assert said in (tmp_path / "x_files/tables/summary.md").read_text(encoding="utf-8")


def test_own_data_and_modules_under_one_name(place, tmp_path, capsys):
    """With one configuration they are told apart; where each seed has its own a note says so."""
    one, other = {"dataset": "d" * 64, "model": "a" * 64}, {"dataset": "d" * 64, "model": "b" * 64}
    for second, more in ((other, {}), ({**one, "dataset": "e" * 64}, {"seed": 1})):
        rows = [row(40.0, zeta=0), row(50.0, zeta=0, **more)]
        for r, inputs in zip(rows, (one, second), strict=True):
            r["config"] |= {"dataset": "mine", "model": "custom"}
            r["inputs"] = inputs
        write(place / "a.jsonl", rows)
        assert run(capsys, place, "--out", tmp_path / "x.html")[0] == 0
        tables = tmp_path / "x_files/tables"
        assert len((tables / "all-runs.csv").read_text(encoding="utf-8").splitlines()) == 3
        said = (tables / "summary.md").read_text(encoding="utf-8")
        assert ("**mine with custom bbbbbb.**" in said) == (not more)
        assert ("mine: runs with different data under this name stand together." in said) == bool(more)
        assert "another result elsewhere" not in said
