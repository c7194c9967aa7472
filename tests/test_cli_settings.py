"""What commands share: settings as text, files that results go to, and a line that is redrawn in place."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import typer

from windtunnel.cli.errors import usage_errors
from windtunnel.cli.output import status_line
from windtunnel.cli.results import check_files, check_is_parquet
from windtunnel.cli.settings import read_overrides, read_setting, read_specs, words_in
from windtunnel.rundir import OutputError
from windtunnel.scenarios.errors import ScenarioError


def test_a_setting_has_the_key_of_the_scenario_file_and_a_value_of_its_kind() -> None:
    assert read_setting("--num-prompts=20") == ("num_requests", 20)
    assert read_setting("tp = 2") == ("tensor_parallel_size", 2)
    assert read_setting("engine=0.10") == ("engine_version", "0.10")
    assert read_setting("output={dist = 'geometric', mean = 8}") == ("output", {"dist": "geometric", "mean": 8})
    for text in ("max_num_seqs", "=5"):
        with pytest.raises(typer.BadParameter, match="KEY=VALUE; see there"):
            read_setting(text, advice="; see there")


def test_a_flag_and_a_setting_that_say_the_same_are_refused() -> None:
    flags = {"--slo": ("objectives", ["ttft:p99<1s"]), "--goodput": ("goodput", []), "--gpu-price": ("gpu_hour", None)}
    assert read_overrides(["seed=3", "goodput=ttft:500"], flags) == {
        "seed": 3,
        "goodput": "ttft:500",
        "objectives": ["ttft:p99<1s"],
    }
    with pytest.raises(typer.BadParameter, match="--slo and --set objectives"):
        read_overrides(["slo=ttft:p99<2s"], flags)
    with pytest.raises(typer.BadParameter, match="set twice"):
        read_overrides(["tp=1", "tensor_parallel_size=2"], {})
    with pytest.raises(typer.BadParameter, match="seed is tuned twice"):
        read_specs(["seed=1,2", "seed=3"], "--tune", said="tuned")


def test_every_word_that_may_name_a_file_is_found() -> None:
    told = {"trace": "choice:a.csv, b.csv", "cost": {"path": "p,q.json"}, "model": ["m.json"], "seed": 3}
    assert {"a.csv", "b.csv", "p,q.json", "m.json"} <= set(words_in(told))


def test_files_are_checked_before_the_work(tmp_path: Path) -> None:
    read = tmp_path / "trace.csv"
    read.write_text("x")
    one = tmp_path / "a.html"
    check_files({"--html": one, "--csv": None}, [str(read)])
    with pytest.raises(OutputError, match="is read for that"):
        check_files({"--csv": read}, [str(read)])
    with pytest.raises(typer.BadParameter, match="--html and --csv both name"):
        check_files({"--html": one, "--csv": tmp_path / "." / "a.html"}, [])
    with pytest.raises(typer.BadParameter, match=r"must end in \.parquet"):
        check_is_parquet(tmp_path / "a.csv")


def test_errors_with_an_exit_code_of_their_own_keep_it() -> None:
    with pytest.raises(typer.BadParameter, match="too many"), usage_errors():
        raise ValueError("too many")
    with pytest.raises(ScenarioError), usage_errors():
        raise ScenarioError("unknown")


def test_a_line_is_redrawn_in_place_cut_to_the_terminal_and_wiped_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((10, 24)))
    show, close = status_line("{} of {}".format, quiet=False, every_s=0.0)
    assert show is not None
    show(1, 100_000_000)
    show(2, 3)
    close()
    assert terminal.getvalue() == "\r1 of 1000\r2 of 3   \r      \r"
    assert status_line(str, quiet=True)[0] is None
