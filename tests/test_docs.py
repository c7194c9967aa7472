"""What the documents show works, and what they name exists."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import textwrap
import tomllib
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import REPO_ROOT

import windtunnel as wt
from windtunnel.cli.main import COMMANDS, main
from windtunnel.scenarios.flags import PARAMETER_OF_KEY
from windtunnel.scenarios.json_schema import markdown
from windtunnel.scenarios.load import Override, load_scenario
from windtunnel.scenarios.resolve import resolve
from windtunnel.scenarios.schema import SyntheticWorkload
from windtunnel.scenarios.workloads import FORMATS, lengths_from, native, read_trace
from windtunnel.sim.deployment.hf_config import ARCHITECTURES
from windtunnel.sim.records import Outcome, PreemptionTable, RequestTable, SpanTable, StepTable
from windtunnel.sim.workload import Workload

DOCS = sorted([REPO_ROOT / "README.md", *(REPO_ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def scenarios_shown() -> list[str]:
    """The scenarios of docs/scenarios.md, and the second once more with the sessions that are commented out."""
    first, second = blocks(REPO_ROOT / "docs" / "scenarios.md", "toml")
    shown, commented = second.split("\n[workload.prefixes]")
    sessions = [line.removeprefix("# ") for line in commented.splitlines() if line.startswith("# ")]
    return [first, second, "\n".join([shown, *sessions])]


@pytest.mark.parametrize("index", range(3))
def test_the_scenarios_shown_can_be_run(index: int, tmp_path: Path) -> None:
    """As far as to the requests and the memory plan, on the hardware of the first if they name none."""
    write_traffic(tmp_path / "traffic.csv")
    text = scenarios_shown()[index]
    (tmp_path / "shown.toml").write_text(text)
    hardware = {} if "[deployment]" in text else {"model": "llama-3.1-8b", "gpu": "h100"}
    loaded = load_scenario(tmp_path / "shown.toml", {key: Override(name, key) for key, name in hardware.items()})
    resolved = resolve(loaded)
    asked = resolved.scenario.workload
    assert len(resolved.workload) == (asked.num_requests if isinstance(asked, SyntheticWorkload) else 1200)
    has_sessions = isinstance(asked, SyntheticWorkload) and asked.sessions is not None
    assert bool((resolved.workload.previous >= 0).any()) == has_sessions


def write_traffic(path: Path) -> None:
    """A request a second for half an hour."""
    rows = [f"{second},{100 + second % 900},{20 + second % 100}\n" for second in range(1800)]
    path.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n" + "".join(rows))


def test_the_longest_length_that_is_promised_comes_out() -> None:
    text = (REPO_ROOT / "docs" / "scenarios.md").read_text()
    spec = tomllib.loads(scenarios_shown()[1])["workload"]["output"]
    assert f"here to {lengths_from(spec).points[-1][1]:,.0f} tokens" in " ".join(text.split())  # type: ignore[attr-defined]


def test_the_list_of_keys_is_that_of_the_program() -> None:
    text = (REPO_ROOT / "docs" / "scenarios.md").read_text()
    marks = r"<!-- windtunnel schema --markdown: begin -->\n(.*)<!-- windtunnel schema --markdown: end -->"
    shown = re.search(marks, text, re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == markdown().strip(), "put the output of `windtunnel schema --markdown` there"


def test_the_flags_that_are_called_otherwise_are_listed() -> None:
    text = (REPO_ROOT / "docs" / "scenarios.md").read_text()
    listed = dict(re.findall(r"^\| `--([a-z-]+)` \| `(\w+)`", text, re.MULTILINE))
    assert listed == {parameter.replace("_", "-"): key for key, parameter in PARAMETER_OF_KEY.items()}


def test_the_commands_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_model import tiny_config

    from windtunnel.executor.server import run

    monkeypatch.chdir(tmp_path)
    write_traffic(Path("your-trace.csv"))
    Path("my-llama").mkdir()
    Path("my-llama/config.json").write_text(json.dumps(tiny_config()))
    Path("case.json").write_text('{"config": {}, "requests": [{"id": "a", "prompt_len": 50, "output_len": 2}]}')
    text = (REPO_ROOT / "README.md").read_text()
    shown = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    shown += re.findall(r"`(windtunnel \w+ case\.json)`", text)
    commands = [shlex.split(line, comments=True)[1:] for line in shown if line.startswith("windtunnel ")]
    assert len(commands) >= 7
    served: list[object] = []
    monkeypatch.setattr(run, "listen", lambda host, _, listen=run.listen: listen(host, 0))
    monkeypatch.setattr(run, "run_server", lambda _, listener, *__, **___: served.append(listener.close()))
    for command in commands:
        if command[0] == "measure":
            command[command.index("--budget") + 1] = "20s"
        code = main(command)
        missed = command[:2] == ["simulate", "chat-8b-h100"] and bool({"30", "32"} & set(command))  # as README says
        assert code == (99 if missed else 0), (command, capsys.readouterr().err)
        capsys.readouterr()
    assert len(served) == sum(command[0] == "serve" for command in commands) == 2
    assert 4e6 < Path("runs/32.html").stat().st_size < 6e6, "the size that is stated"


COLUMN = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


def columns_described(table: str) -> dict[str, str]:
    """Columns of a table of the run folder, in order, each with its meaning."""
    text = (REPO_ROOT / "docs" / "run-folder.md").read_text()
    return dict(COLUMN.findall(text.partition(f"\n## {table}\n")[2].partition("\n## ")[0]))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_traffic(folder / "traffic.csv")
    run = wt.simulate("preemption-storm", workload={"trace": str(folder / "traffic.csv"), "limit": 50})
    run.save(folder / "run")
    return folder / "run"


@pytest.mark.parametrize("table", ["requests", "steps", "spans", "preemptions", "drafts", "workload"])
def test_every_column_of_the_run_folder_is_described(table: str, saved_run: Path) -> None:
    described = columns_described(table)
    assert list(described) == pq.read_schema(saved_run / f"{table}.parquet").names
    assert all(described.values())


TABLES = {
    "requests": RequestTable,
    "steps": StepTable,
    "spans": SpanTable,
    "preemptions": PreemptionTable,
    "workload": Workload,
}


@pytest.mark.parametrize("table", TABLES)
def test_columns_are_described_as_where_they_are_defined(table: str) -> None:
    """The first paragraph of each docstring below a field, where there is one and it says more than a name."""
    described = columns_described(table)
    meant = field_docs(TABLES[table])
    assert len(meant) >= {"spans": 0, "steps": 3}.get(table, 4)
    for name, text in meant.items():
        if name in described and name not in ("outcome", "request", "labels"):
            assert text in described[name] + ".", name


def field_docs(kind: type) -> dict[str, str]:
    """Docstrings below the fields of a dataclass, in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(ast.literal_eval(doc.value).replace("``", "`").split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def test_files_of_the_run_folder_are_listed(saved_run: Path) -> None:
    text = (REPO_ROOT / "docs" / "run-folder.md").read_text()
    assert set(re.findall(r"^\| `([\w.]+\.(?:parquet|json))` ", text, re.MULTILINE)) == {
        path.name for path in saved_run.iterdir()
    }


def test_outcomes_are_described() -> None:
    words = ", ".join(f"{outcome.value} {outcome.name.lower()}" for outcome in Outcome)
    assert columns_described("requests")["outcome"] == words


def test_the_architectures_that_are_modelled_are_listed() -> None:
    text = (REPO_ROOT / "docs" / "limits.md").read_text()
    assert set(re.findall(r"`(\w+ForCausalLM)`", text)) == set(ARCHITECTURES)


def test_the_trace_shown_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(blocks(REPO_ROOT / "docs" / "traces.md", "csv")[0])
    assert len(read_trace(tmp_path / "trace.csv")) == 2


def test_every_trace_format_and_every_column_of_our_own_is_documented() -> None:
    text = (REPO_ROOT / "docs" / "traces.md").read_text()
    assert [name for name in (*FORMATS, *sorted(native.COLUMNS)) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


VLLM_FLAGS = {
    "--additional-config",
    "--append-result",
    "--backend",
    "--base-url",
    "--dataset-name",
    "--endpoint",
    "--ignore-eos",
    "--distributed-executor-backend",
    "--preemption-mode",
    "--random-input-len",
    "--random-output-len",
    "--random-range-ratio",
    "--result-filename",
    "--save-detailed",
    "--save-result",
    "--scheduler-cls",
    "--tokenizer",
}
"""Flags of vLLM's own programs that the documents speak of."""


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_and_flags_that_are_shown_exist(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"^windtunnel (\w+)", text, re.MULTILINE)) <= set(COMMANDS)
    sources = "".join(file.read_text() for file in (REPO_ROOT / "windtunnel" / "cli").glob("*.py"))
    for folder in ("benchmarks", "calibrate"):
        sources += "".join(file.read_text() for file in (REPO_ROOT / folder).glob("*.py"))
    ours = set(re.findall(r"--[a-z][a-z-]+", sources)) | {"--help", "--version"}
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(re.findall(r"`([^`]+)`", text)))):
        assert flag in ours | VLLM_FLAGS or path.name == "vllm-plugins.md", flag


def test_the_invariants_name_tests_that_exist() -> None:
    text = (REPO_ROOT / "docs" / "invariants.md").read_text()
    for file, _, name in re.findall(r"`(test_\w+\.py)(::(\w+))?`", text):
        content = (REPO_ROOT / "tests" / file).read_text()
        assert not name or f"def {name}(" in content, f"{file}::{name}"
