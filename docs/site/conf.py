"""The documents and an API reference as one searchable site: `make docs`.

Sources are the files as they lie in the repository, so that a link means the same there and here. Warnings are errors:
a link or an anchor that leads nowhere, a docstring that is no reStructuredText, a name that cannot be imported.
"""

from __future__ import annotations

import re
from importlib import metadata

from sphinx.application import Sphinx

PAGES = {
    "Use": [
        "docs/how-to",
        "docs/man",
        "docs/running",
        "docs/bring-your-own",
        "docs/algorithms",
        "docs/models",
        "docs/data",
        "docs/text",
        "docs/poisoning",
    ],
    "Measure": [
        "docs/flatness",
        "docs/paper",
        "docs/field",
        "results/README",
        "benchmarks/RESULTS",
        "benchmarks/neighbours/README",
    ],
    "On many machines": ["docs/flower", "docs/flower-dropin", "docs/flower-tls", "docs/flower-faults"],
    "Look up": ["docs/site/api", "docs/coming-from", "docs/first-hour", "docs/reliability", "docs/architecture"],
    "Embedded data": ["src/fedman/data/DIGITS", "src/fedman/data/SHAKESPEARE"],
    "Take part": ["CONTRIBUTING", "CHANGELOG"],
}

project = "fedman"
release = metadata.version("fedman")
copyright = "the fedman authors, Apache-2.0"
root_doc = "README"
include_patterns = ["README.md", *(f"{page}.md" for pages in PAGES.values() for page in pages)]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

html_theme = "furo"
html_title = f"fedman {release}"
html_show_sphinx = False
html_additional_pages = {"index": "to_readme.html"}
templates_path = ["."]

myst_heading_anchors = 4  # as GitHub makes them
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "literal"  # a name in `backticks`
pygments_style = "friendly"


def add_contents(app: object, page: str, source: list[str]) -> None:
    """The table of contents, which the README on GitHub does not need."""
    if page == root_doc:
        for title, pages in PAGES.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"


def escape_norms(app: object, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """|w| in a docstring is no substitution."""
    lines[:] = [re.sub(r"\|(?=\S)", r"\|", line) for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", escape_norms)
