"""What can be wrong with a scenario."""

from __future__ import annotations


class ScenarioError(ValueError):
    """A scenario, flag or setting is wrong; each line of the message is one complaint and says what to do."""


class NothingToServe(ScenarioError):
    """vLLM would start, and refuse every request."""


class ScenarioUnreadable(ScenarioError):
    """The scenario file cannot be read at all."""
