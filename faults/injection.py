"""Injection: texts of results files that try to leave their place on the report's page, in a real browser."""

from __future__ import annotations

from pathlib import Path

from faults.tally import Tally
from fedman.paper.report import command
from tests.paper.report import report_browser as browser

WHAT = "a report of hostile texts: nothing runs, nothing is fetched, no element is added"


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """A page for every text, in all places where a text may stand; then one of all of them."""
    if not small and not browser.there_is_a_browser():
        tally.note(WHAT, "not tried: chromium and chromedriver are not installed")
        return
    with browser.listening() as (url, asked):
        texts = browser.hostile_texts(url)
        cases = [[text] for text in texts] + [texts]
        pages = [page_of(scratch / str(number), url, case) for number, case in enumerate(cases[:1] if small else cases)]
        if small:  # the browser's part of this is in the tests of the page
            content = pages[0].read_text(encoding="utf-8")
            held = texts[0] not in content and "Content-Security-Policy" in content
            tally.check(WHAT, None if held else f"{texts[0]}: on the page as it is")
            return
        (scratch / "profile").mkdir()
        driver = browser.open_browser(scratch / "profile")
        try:
            for page in pages:
                tally.check(WHAT, browser.escaped(driver, page, asked))
        finally:
            driver.quit()


def page_of(folder: Path, url: str, texts: list[str]) -> Path:
    """The report of results with these texts."""
    (folder / "results").mkdir(parents=True)
    browser.hostile_results(folder / "results", url, texts)
    command(folder / "results", folder / "report.html")
    return folder / "report.html"
