"""What docs/serve.md shows works."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import httpx
import pytest
from conftest import REPO_ROOT
from test_serve_command import BARE, planned, process

from windtunnel.sim.cost.profile import load_profile

TEXT = (REPO_ROOT / "docs" / "serve.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands(beginning: str) -> list[list[str]]:
    """The words of each shown command that begins like this."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(beginning)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the page's model has been made as the page says."""
    [making] = [block for block in blocks("bash") if "mkdir" in block]
    subprocess.run(["bash", "-ec", making.split("\nEND\n")[0] + "\nEND\n"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_servers_that_are_shown_can_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = commands("windtunnel serve")
    assert len(shown) >= 4
    for words in shown:
        planned(monkeypatch, *words[2:])


def test_the_first_lines_are_those_of_the_program() -> None:
    with process(*commands("windtunnel serve")[0][2:]) as running:
        told = running.told
    [shown] = re.findall(r"```\n(Model .*?)```", TEXT, re.DOTALL)
    assert told[:3] == shown.splitlines()[:3]


def test_the_executor_is_swapped_as_shown(folder: Path) -> None:
    pytest.importorskip("torch")
    [serving] = [words for words in commands("windtunnel serve") if "torch" in words]
    swaps = [json.loads(words[-1]) for words in commands("curl") if words[-1].startswith('{"kind"')]
    assert [body["kind"] for body in swaps] == ["sim", "torch"]
    with process(*serving[2:]) as (_, url, _):
        for body in swaps:
            swapped = httpx.post(url + "/windtunnel/executor", json=body).json()
            assert swapped == {"kind": body["kind"], "num_recomputed_tokens": 0}
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert httpx.post(url + "/v1/chat/completions", json=chat).status_code == 200


def test_the_request_that_is_shown_is_answered() -> None:
    [body] = [json.loads(words[-1]) for words in commands("curl") if "prompt" in words[-1]]
    with process(*BARE) as (_, url, _):
        answer = httpx.post(url + "/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == body["max_tokens"]


def test_the_profile_that_is_shown_prices_steps(tmp_path: Path) -> None:
    [shown] = blocks("json")
    (tmp_path / "profile.json").write_text(shown)
    assert load_profile(tmp_path / "profile.json").name == "affine"


def test_the_tokenizer_that_is_shown_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    [code] = blocks("python")
    exec(compile(code, "docs/serve.md", "exec"), {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "any-tokenizer"))
    ids = tokenizer.encode("Grüße, 世界")
    assert tokenizer.decode(ids) == "Grüße, 世界"
    assert len(tokenizer) == 256
