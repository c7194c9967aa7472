"""What the documents show works, and what they name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from conftest import REPO_ROOT

from windtunnel.cli.main import COMMANDS
from windtunnel.scenarios.load import load_scenario
from windtunnel.scenarios.workloads import FORMATS, read_trace
from windtunnel.sim.engine.config import SchedulerConfig

DOCS = sorted([REPO_ROOT / "README.md", *(REPO_ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(2))
def test_the_scenarios_shown_are_valid(index: int, tmp_path: Path) -> None:
    text = blocks(REPO_ROOT / "docs" / "scenarios.md", "toml")[index]
    scenario = {"name": "shown", "schema_version": 1, **tomllib.loads(text)}
    assert load_scenario(scenario).scenario.workload is not None


def test_the_commented_out_sessions_are_valid_too() -> None:
    text = blocks(REPO_ROOT / "docs" / "scenarios.md", "toml")[1]
    shown, commented = text.split("\n[workload.prefixes]")
    sessions = "\n".join(line.removeprefix("# ") for line in commented.splitlines() if line.startswith("# "))
    load_scenario({"name": "shown", **tomllib.loads(shown + "\n" + sessions)})


def test_the_trace_shown_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(blocks(REPO_ROOT / "docs" / "traces.md", "csv")[0])
    assert len(read_trace(tmp_path / "trace.csv")) == 2


def test_every_trace_format_is_documented() -> None:
    text = (REPO_ROOT / "docs" / "traces.md").read_text()
    assert [name for name in FORMATS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_and_flags_that_are_shown_exist(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"^windtunnel (\w+)", text, re.MULTILINE)) <= set(COMMANDS)
    known = {"--help", "--version"} | {f"--{name.replace('_', '-')}" for name in SchedulerConfig.__dataclass_fields__}
    help_text = (REPO_ROOT / "windtunnel" / "cli" / "simulate.py").read_text()
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(re.findall(r"`([^`]+)`", text)))):
        assert flag in known or flag in help_text or path.name in ("traces.md", "architecture.md"), flag


def test_the_invariants_name_tests_that_exist() -> None:
    text = (REPO_ROOT / "docs" / "invariants.md").read_text()
    for file, _, name in re.findall(r"`(test_\w+\.py)(::(\w+))?`", text):
        content = (REPO_ROOT / "tests" / file).read_text()
        assert not name or f"def {name}(" in content, f"{file}::{name}"
