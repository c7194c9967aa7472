"""Words of a command line that know where they stand."""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """One argument as the program gets it."""

    text: str
    source: str = ""
    """FILE:LINE, the path of the key that holds it, or nothing for a bare command line."""
    unresolved: tuple[str, ...] = ()
    """Names of variables in it whose value is not known; the text has them as written."""
