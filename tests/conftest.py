"""Shared set-up of the tests: hypothesis profiles, paths, and a count of the golden steps that were compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO_ROOT = Path(__file__).resolve().parent.parent
SHARED = REPO_ROOT.parent / "shared"

settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=200, derandomize=True)
settings.register_profile("nightly", parent=settings.get_profile("dev"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture
def shared() -> Path:
    """The folder of recordings that is not part of the project; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("the shared recordings are not here")
    return SHARED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many recorded decisions were compared."""
    steps = cases = 0
    for report in terminalreporter.getreports("passed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "golden_steps" and report.when == "call":
                steps += value
                cases += 1
    if cases:
        terminalreporter.write_line(f"golden: {steps:,} recorded steps of {cases} runs compared and identical")
