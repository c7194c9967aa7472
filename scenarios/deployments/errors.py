"""What can be wrong with a deployment."""

from __future__ import annotations

from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable


def printable(text: str) -> str:
    """The text with what no file can hold (halves of surrogate pairs) written out as ``\\ud800``."""
    return text.encode("utf-8", "backslashreplace").decode()


class DeploymentError(ScenarioError):
    """A deployment holds something that cannot be meant; the message begins with its place and ends with a remedy."""


class DeploymentUnreadable(ScenarioUnreadable):
    """The file or text is not there, is no text, or is no deployment of a known kind."""
