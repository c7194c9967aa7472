"""The frame of the published pages: what was compared, by which version, and the benchmark that wrote it down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from windtunnel.reports.figures import Figure
from windtunnel.reports.page import masthead, write_page


def write_published(
    path: str | Path,
    title: str,
    body: Iterable[str],
    *,
    subject: str,
    version: str,
    skip_to: str,
    drawn: Sequence[Figure],
    styles: Sequence[str] = ("page.css",),
) -> None:
    """Write the page of ``benchmarks/SUBJECT_page.py``, whose numbers are in SUBJECT.json; see ``page.write_page``."""
    write_page(
        path,
        title,
        body,
        skip_to=skip_to,
        head=masthead(title, escape(f"windtunnel {version}, {subject}")),
        foot=f"Made by benchmarks/{subject}_page.py of windtunnel {version}; the numbers are in {subject}.json beside "
        "this file.",
        drawn=drawn,
        styles=styles,
    )
