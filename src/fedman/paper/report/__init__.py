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
    from fedman.runs.atomic import refuse_link, write_bytes, write_text, writing
    from fedman.runs.results import not_checked

    found = find(place)
    with rc_context(STYLE):  # type: ignore[arg-type]
        report = compose(found)
    beside = out.with_name(f"{out.stem}_files")
    page = render(report, beside.name)
    for folder in (beside, beside / "figures", beside / "tables"):
        refuse_link(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    written = set()
    for picture in report.pictures:
        for ending, content in (("svg", picture.svg), ("png", picture.png)):
            path = beside / "figures" / f"{picture.name}.{ending}"
            write_bytes(path, content)
            written.add(path)
    texts = {f"{name}.md": text for name, text in report.summaries.items()}
    for table in report.tables:
        texts |= {f"{table.name}.csv": table.csv(), f"{table.name}.md": table.markdown()}
    for name, text in texts.items():
        write_text(beside / "tables" / name, text)
        written.add(beside / "tables" / name)
    others = sum(path not in written for kind in ("figures", "tables") for path in (beside / kind).iterdir())
    write_text(out, page)
    size = len(page.encode()) / 1e6
    made = f"{len(report.pictures)} pictures, {len(report.tables)} tables, {size:.1f} MB"
    made += f"\nin {beside}: {others} {'file' if others == 1 else 'files'} not of this report" if others else ""
    return f"{out}: {len(found.rows) + len(found.field.rows)} runs, {made}{not_checked(found.unchecked)}"
