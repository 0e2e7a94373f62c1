"""`idn report RESULTS`: report.md and report.html from a folder of results."""

from pathlib import Path
from typing import Annotated

import tyro

from idn.errors import UserError
from idn.files import write_bytes
from idn.report import html, markdown
from idn.report.page import build_page
from idn.report.results import read_results


def report(
    results: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(help="folder of results, as `idn collect` writes it")
    ] = Path("results"),
) -> None:
    """Write report.md and report.html, the paper's Table 1 beside ours, into the folder of results."""
    found = read_results(results)
    if not found:
        raise UserError(f"no runs in {results}; `idn collect RUN ... --out {results}` puts some there")
    parts = build_page(found)
    write_bytes(results / "report.md", markdown.render(parts, results).encode())
    write_bytes(results / "report.html", html.render(parts).encode())
    print(f"{len(found)} run{'s' * (len(found) != 1)} -> {results / 'report.md'}, {results / 'report.html'}")
