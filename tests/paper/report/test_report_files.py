"""The command: what it reads, what it writes, what it refuses; flatness, cost and partitions behind it."""

import json
import math
import re

import numpy as np
import pytest
from report_rows import flatness, pair, row, write

import fedman
from fedman.cli.commands import main
from fedman.data import SPECS, partition
from fedman.models import build
from fedman.paper.report import cost, hessian, spectra


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
    code, said, _ = run(capsys, place, "--out", out)
    assert code == 0
    assert re.fullmatch(r"\S+page.html: 6 runs, \d+ pictures, \d+ tables, \d\.\d MB\n", said)
    page = out.read_text(encoding="utf-8")
    assert "b.jsonl: 1 runs have another result elsewhere" in page
    assert "40.50 ± 0.71" in page
    assert "51.49" in page, "the paper's λ_max"
    assert "1.980" in page
    assert ">0.075</text>" in page, "a label of the ζ axis"
    assert ">10⁻³</text>" in page, "a label of the density's axis"
    assert "mathdefault" not in page
    assert not re.search(r'(?:src|href|url)\s*[=(]\s*["\']?(?:https?:)?//', page), "nothing from the network"
    linked = {tmp_path / link for link in re.findall(r'href="(page_files/[^"]+)"', page)}
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
    code, said, _ = run(capsys, tmp_path / "runs" / "z0s0", "--out", tmp_path / "b.html")
    assert code == 0
    assert "1 runs" in said


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
    assert "Diverged: FedAvg, FedAvg+MAN." in page
    assert "NaN" not in page


def broken(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


GOOD = json.dumps(row(40.0, zeta=0)) + "\n"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "results: nothing to report"),
        (broken("a.jsonl", ""), "results: nothing to report"),
        (broken("a.jsonl", GOOD + "{"), "a.jsonl: line 2: not a results file"),
        (broken("a.jsonl", GOOD + "\n"), "a.jsonl: line 2: not a results file"),
        (broken("a.jsonl", GOOD + '{"config": {}}\n'), "a.jsonl: line 2: config.dataset is missing"),
        (broken("a.jsonl", b"\xff\xfe\x00"), "a.jsonl: not a text file"),
        (broken("summary.json", "{"), "summary.json: not JSON"),
        (broken("summary.json", "{}"), "summary.json: config is missing"),
        (broken("flatness.json", "{"), "flatness.json: not a JSON file"),
        (broken("flatness.json", "[]"), "flatness.json: a JSON object is needed"),
        (broken("flatness.json", '{"format": 2}'), "flatness.json: not measurements in format 1"),
        (broken("flatness.json", '{"format": 1, "run": {}, "models": {}}'), "flatness.json: run.dataset is missing"),
        (
            broken("flatness.json", json.dumps(flatness() | {"models": {"all": {"top": {}}}})),
            "flatness.json: models.all.top.values is missing",
        ),
        (
            broken("flatness.json", json.dumps(flatness() | {"models": {"all": {"top": {"values": ["x"]}}}})),
            "flatness.json: models.all.top.values is missing or not of the right kind",
        ),
        (
            broken("flatness.json", json.dumps(flatness() | {"models": {"all": {"density": {"nodes": [1.0]}}}})),
            "flatness.json: models.all.density.nodes is missing or not of the right kind",
        ),
        (broken("flatness.json", json.dumps(flatness() | {"models": {"all": [3]}})), "models.all must hold an object"),
        (
            broken("flatness.json", json.dumps(flatness() | {"run": flatness()["run"] | {"config": 3}})),
            "flatness.json: run.config is not an object",
        ),
        (broken("cost.json", '{"steps": [{"where": "here"}]}'), "cost.json: steps must be a list of objects"),
        (broken("cost.json", "{}"), "cost.json: steps must be a list of objects"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(place, tmp_path, capsys, make, message):
    make(place)
    code, said, error = run(capsys, place, "--out", tmp_path / "page.html")
    assert code == 2
    assert said == ""
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
def test_bad_words(place, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    write(place / "a.jsonl", pair(40.0, 52.0))
    code, _, error = run(capsys, *words)
    assert code == 2
    assert message in error


def test_hessian_tables_beside_the_papers():
    records = [flatness(), flatness(zeta=0.15, top=44.0, trace=4400.0), flatness("feddc", top=35.0, trace=3600.0),
               flatness(seed=1, top=53.0, trace=8900.0)]  # fmt: skip
    (table,) = hessian.tables(hessian.read(records))
    assert table.rows == [
        ["FedAvg", "52.00 ± 1.41", "51.49", "1.01", "8800 ± 141", "8744", "1.01", "2"],
        ["FedAvg+MAN", "44.00", "43.80", "1.00", "4400", "4397", "1.00", "1"],
        ["FedDC", "35.00", "35.13*", "–", "3600", "3578*", "–", "1"],
    ]
    assert "copy" in table.note
    assert [(a.seed, b.figure("trace")) for a, b in hessian.drops(hessian.read(records))] == [(0, 4400.0)]


def test_records_of_one_run_are_one_run():
    """λ_max and trace on most samples; pictures on the number of samples that most runs have."""

    def on(count, values, algorithm="fedavg"):
        record = flatness(algorithm)
        record["models"]["all"] = {
            "top": {"values": values, "samples": count},
            "trace": {"value": values[0], "samples": count},
        }
        return record

    records = [on(10, [5.0, 4.0]), on(50, [6.0, 5.0]), on(50, [6.0]), on(10, [3.0, 2.0], "fedsam")]
    measured = hessian.read(records)
    (table,) = hessian.tables(measured)
    assert [(r[0], r[1], r[-1]) for r in table.rows] == [("FedAvg", "6.00", "1"), ("FedSAM", "3.00", "1")]
    assert "on 10 and 50 training samples" in hessian.basis(measured)
    (picture,) = spectra.pictures(measured)["spectrum"]
    assert [line["y"] for line in json.loads(picture.hover)["lines"]] == [[5.0, 4.0], [3.0, 2.0]]
    assert [r[6:] for r in hessian.every(records).rows][:2] == [["trace", "5", "–", "10"], ["trace", "6", "–", "50"]]


def test_another_setting_is_a_row_of_its_own():
    """A run that departs from the paper's setting is not taken for one that does not, in tables or pictures."""
    plain, stale = flatness("fedspeed", top=13.0), flatness("fedspeed", top=17.0)
    for record, keys in ((plain, {}), (stale, {"stale_ascent": True})):
        record["run"]["config"] = row(50.0, algorithm="fedspeed", zeta=0, **keys)["config"]
    records = [stale, plain, flatness("fedspeed", zeta=0.15, top=9.0)]
    measured = hessian.read(records)
    (table,) = hessian.tables(measured)
    assert [r[:2] for r in table.rows] == [
        ["FedSpeed", "13.00"],
        ["FedSpeed+MAN", "9.00"],
        ["FedSpeed, stale_ascent=true", "17.00"],
    ]
    assert [(a.figure("top"), b.figure("top")) for a, b in hessian.drops(measured)] == [(13.0, 9.0)]
    assert {r[3] for r in hessian.every(records).rows} == {"", "stale_ascent=true"}
    (picture,) = spectra.pictures(measured)["spectrum"]
    assert [line["y"][0] for line in json.loads(picture.hover)["lines"]] == [13.0, 9.0]


def test_layers_and_clients_of_the_hessian():
    measured = hessian.read([flatness()])
    assert hessian.layers(measured).rows == [["dir0.3", "FedAvg", "0", "fc", "3", "40", "2"]]
    assert hessian.clients(measured).rows == [["dir0.3", "FedAvg", "0", "4", "8", "6", "10"]]


def test_what_was_not_finite_is_left_out(place, tmp_path, capsys):
    record = flatness()
    record["models"]["all"] |= {
        "top": {"values": [None, -1.0]},
        "trace": {"value": None},
        "density": {"nodes": [[None, 1.0], [0.0]], "weights": [[0.5, 0.5], [0.5, 0.5]]},
        "landscape": {"offsets": [-1.0, 1.0], "losses": [[None, 1.0], [2.0, None]]},
    }
    (place / "flatness.json").write_text(json.dumps(record))
    code, said, _ = run(capsys, place, "--out", tmp_path / "page.html")
    assert code == 0
    assert "0 runs, 2 pictures" in said, "a surface and a map"


def test_one_results_file_is_enough(place, tmp_path, capsys):
    path = write(place / "a.jsonl", [row(40.0, zeta=0), row(41.0, zeta=0)])
    code, said, _ = run(capsys, path, "--out", tmp_path / "page.html")
    assert code == 0
    assert "1 runs" in said
    assert "a.jsonl: 1 runs have another result elsewhere" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_papers_count_of_multiplications():
    """Protocol §6.5: 57 152 for the hidden layers against 14.7 million; the logits are 100 more."""
    counted = cost.layers(build("cifar_cnn", (3, 32, 32), 100), (3, 32, 32))
    assert sum(layer.man for layer in counted) == 57_152 + 100
    assert [layer.own for layer in counted] == [
        64 * 28 * 28 * 3 * 25, 64 * 10 * 10 * 64 * 25, 1600 * 384, 384 * 192, 192 * 100,
    ]  # fmt: skip


def test_partition_pictures_need_no_images():
    """The table of counts depends on the class sizes alone, whatever the order of the samples."""
    labels = np.repeat(np.arange(20), 50)
    shuffled = np.random.default_rng(0).permutation(labels)
    for spec, name in (("dir0.3", "cifar100"), ("dir0.6", "cifar10"), ("iid", "cifar100")):
        counts = [
            partition.table(y, partition.split(y, spec, 10, classes=20, iid=SPECS[name].iid), 20)
            for y in (labels, shuffled)
        ]
        assert (counts[0] == counts[1]).all()
