"""Words of a command line that know where they stand."""

from __future__ import annotations

from typing import NamedTuple

from windtunnel.scenarios.deployments.errors import DeploymentError


class Unclosed(NamedTuple):
    """A quote or bracket that is opened and never closed, so that it reaches to the end of the text."""

    closing: str
    """What would close it."""
    source: str
    text: str
    """From the quote or bracket on."""

    def complaint(self) -> DeploymentError:
        """The error that says so."""
        first = self.text.splitlines()[0].rstrip()
        shown = first if len(first) <= 40 else f"{first[:37]}..."
        kind = "quote" if self.closing in "'\"`" else "bracket"
        place = self.source or "command line"
        return DeploymentError(
            f"{place}: the {kind} that opens at  {shown}  is never closed: write {self.closing} where it ends"
        )


class Word(NamedTuple):
    """One argument as the program gets it."""

    text: str
    source: str = ""
    """FILE:LINE, the path of the key that holds it, or nothing for a bare command line."""
    unresolved: tuple[str, ...] = ()
    """Names of variables in it whose value is not known; the text has them as written."""
    unclosed: Unclosed | None = None
    """What is opened in it and never closed."""
