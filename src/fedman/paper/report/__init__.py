"""`fedman report`: one self-contained page of tables and figures made from results, beside the paper's."""

from __future__ import annotations

from pathlib import Path

from fedman.errors import UserError


def command(place: Path, out: Path) -> str:
    """Write the page `out` from what is found in `place`, and the folder of its figures and tables beside it."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: {out} must end in .html")
    from matplotlib import rc_context

    from fedman.paper.report.figure import STYLE
    from fedman.paper.report.page import compose, render
    from fedman.paper.report.sources import find
    from fedman.runs.atomic import write_text

    found = find(place)
    with rc_context(STYLE):  # type: ignore[arg-type]
        report = compose(found)
    beside = out.with_name(f"{out.stem}_files")
    page = render(report, beside.name)
    try:
        for folder in ("figures", "tables"):
            (beside / folder).mkdir(parents=True, exist_ok=True)
        for picture in report.pictures:
            for ending, content in (("svg", picture.svg), ("png", picture.png)):
                (beside / "figures" / f"{picture.name}.{ending}").write_bytes(content)
        for table in report.tables:
            (beside / "tables" / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
            (beside / "tables" / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
        (beside / "tables" / "summary.md").write_text(report.summary, encoding="utf-8")
        write_text(out, page)
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    size = len(page.encode()) / 1e6
    return f"{out}: {len(found.rows)} runs, {len(report.pictures)} pictures, {len(report.tables)} tables, {size:.1f} MB"
