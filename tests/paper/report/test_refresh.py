"""The repository's own results: the page is small and quickly made, and the documents hold its tables."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from docs import refresh
from fedman.paper.flatness import flatness_json
from fedman.paper.presets import METHODS
from fedman.paper.report import command, hessian
from fedman.runs.checksums import file_sha256

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    started = time.process_time()
    command(ROOT / "results", out)
    assert time.process_time() - started < 60
    return out


@pytest.mark.slow
def test_the_page_is_small(page):
    assert page.stat().st_size < 5e6
    for name in ("report", "cifar100"):
        assert (ROOT / f"docs/{name}.png").stat().st_size < 200_000


@pytest.mark.slow
def test_nothing_is_cut_off_at_the_edge_of_a_figure(page):
    figures = sorted((page.parent / "report_files/figures").glob("*.png"))
    assert figures
    for figure in figures:
        pixels = np.asarray(Image.open(figure).convert("RGB"))
        edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (edge == 255).all(), figure.name


@pytest.mark.slow
def test_the_documents_hold_the_tables_of_these_results(page):
    for document in refresh.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        new = refresh.refreshed(text, page.parent / "report_files/tables")
        assert text == new, f"{document.name} is out of date: python docs/refresh.py --picture"
    paper = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    assert {"cifar100-headline", "summary", "cifar100-variants"} <= {
        match[3] for match in refresh.BLOCK.finditer(paper)
    }


def test_a_document_takes_tables_texts_and_pictures(tmp_path):
    """Of a table that is not there it is said; of a text and of a picture there is nothing."""
    page = "".join(
        f"<!-- {mark} -->\nold\n<!-- end -->\n"
        for mark in ("table a", "table b", "text c", "text d", "picture report.png: all of it", "picture no.png: x")
    )
    (tmp_path / "a.md").write_text("| a |\n")
    (tmp_path / "c.md").write_text("said\n")
    new = refresh.refreshed(page, tmp_path)
    inside = [part.partition("<!-- end")[0] for part in new.split("-->\n")[1::2]]
    assert inside == ["| a |\n", "Not measured yet.\n", "said\n", "", "![all of it](report.png)\n", ""]
    assert refresh.refreshed(new, tmp_path) == new


def test_the_documents_say_how_much_was_measured():
    """What is written by hand of the Hessians: how many of the paper's, seeds, images, and what is not there."""
    records = [flatness_json.read(path) for path in flatness_json.find(ROOT / "results/flatness", "*flatness*.json")]
    models = [m for m in hessian.merge(records) if not m.variant and not math.isnan(m.top)]
    cells, seeds = hessian.by_setting(models), {len(members) for members in hessian.by_setting(models)}
    missing = {*METHODS} - {m.algorithm for m in models}
    paper, readme = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("docs/paper.md", "README.md")
    )
    assert (seeds, missing) == ({1}, {"fedasam", "feddc"})
    assert hessian.samples_text(m.best for m in models) == "50 000 training samples"
    assert f"| {len(cells)} of 24 cells, one seed, on all 50 000 images; not FedASAM and FedDC |" in paper
    assert "its minimum flatter with all four that were measured (one seed)." in readme
    assert not any({"layers", "clients"} & {*m.best} for m in models)
    assert "layers' blocks and clients' λ_max of the CIFAR-100 models have not been measured yet |" in paper


def test_no_result_has_changed_unnoticed():
    """`SHA256SUMS` lists every file, and each is as listed."""
    folder = ROOT / "results"
    listed = {name: sum for sum, name in map(str.split, (folder / "SHA256SUMS").read_text().splitlines())}
    found = {f"./{path.relative_to(folder).as_posix()}": file_sha256(path) for path in folder.rglob("*.json*")}
    assert found == listed, "see results/README.md for the command that writes SHA256SUMS"
