"""Bring the documents up to date with the results: their tables, and the pictures of the report's page.

    python docs/refresh.py [--picture]

A document names a table or a text that `fedman report results` makes, and it goes between the two marks:

    <!-- table cifar100-headline -->
    <!-- end -->

or <!-- text field-answer -->, or <!-- picture field.png: what it shows -->, of a picture in docs/. Of a table that is
not there the document says that it was not measured; in place of a text or a picture there is nothing.

--picture also makes docs/cifar100.png and docs/field.png of figures of the page, where there are such, and takes
docs/report.png from the page; that needs selenium and Chromium.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from fedman.paper.report import command

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/paper.md",
    "docs/field.md",
    "docs/models.md",
    "docs/text.md",
    "docs/poisoning.md",
    "results/README.md",
)
DOCUMENTS = tuple(ROOT / page for page in PAGES)
BLOCK = re.compile(r"(<!-- (table|text|picture) ([\w.-]+)(?:: ([^\n]*))? -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH, SECTION, GROUPS = 1280, "#cifar100", 3  # of docs/report.png
SIDE_BY_SIDE = {
    "cifar100": [f"cifar100-dir0.3-{name}" for name in ("curves-1", "fedavg-plain-surface", "fedavg-man-surface")],
    "field": ["field-tuned-dir0.3-overview", "field-hessian", "field-trace"],
}
"""Pictures in docs/, each of figures of the page."""


def refreshed(text: str, tables: Path) -> str:
    """A document with the tables and texts that lie in a folder, and the pictures that lie in docs/."""

    def content(kind: str, name: str, alt: str) -> str:
        if kind == "picture":
            return f"![{alt}]({name})\n" if (ROOT / "docs" / name).exists() else ""
        path = tables / f"{name}.md"
        missing = "Not measured yet.\n" if kind == "table" else ""
        return path.read_text(encoding="utf-8") if path.exists() else missing

    def block(match: re.Match[str]) -> str:
        start, kind, name, alt, end = match.groups()
        return f"{start}{content(kind, name, alt)}{end}"

    return BLOCK.sub(block, text)


def picture(page: Path, path: Path) -> None:
    """The first groups of a section of the page, as a small PNG."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.as_uri())
        top, bottom = browser.execute_script(
            "const y = (s, side) => document.querySelector(s).getBoundingClientRect()[side];"
            f"return [y('{SECTION}', 'top'), y('{SECTION} > .group:nth-of-type({GROUPS})', 'bottom')]"
        )
        clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top + 24, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    finally:
        browser.quit()
    save(Image.open(io.BytesIO(base64.b64decode(shot["data"]))), path)


def side_by_side(figures: Sequence[Path], path: Path) -> None:
    """Figures of the page in one picture."""
    images = [Image.open(figure) for figure in figures]
    height = max(image.height for image in images)
    joined = Image.new("RGB", (sum(image.width for image in images), height), "white")
    left = 0
    for image in images:
        joined.paste(image, (left, (height - image.height) // 2))
        left += image.width
    save(joined, path)


def save(image: Image.Image, path: Path) -> None:
    """Save as a PNG of 256 colours."""
    colours = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colours.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", action="store_true", help="also make the pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        print(command(ROOT / "results", page))
        if options.picture:
            for name, parts in SIDE_BY_SIDE.items():
                figures = [Path(folder) / f"report_files/figures/{part}.png" for part in parts]
                if all(figure.exists() for figure in figures):
                    side_by_side(figures, ROOT / f"docs/{name}.png")
            picture(page, ROOT / "docs/report.png")
        for document in DOCUMENTS:
            text = document.read_text(encoding="utf-8")
            document.write_text(refreshed(text, Path(folder) / "report_files/tables"), encoding="utf-8")


if __name__ == "__main__":
    main()
