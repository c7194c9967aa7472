"""``windtunnel measure`` and ``windtunnel fit`` on what it wrote, or on recordings of a real vLLM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_config

from windtunnel.calibrate.measure import Progress, partial_path
from windtunnel.calibrate.origins import gpu_name, max_graph_tokens, merged
from windtunnel.calibrate.recorded_steps import read_recorded_steps
from windtunnel.calibrate.step_tables import (
    StepTableError,
    loop_gap_s,
    read_step_table,
    read_steps,
    recorded_step_table,
)
from windtunnel.cli.main import main
from windtunnel.cli.measure import progress_line
from windtunnel.executor.vllm_plugin.recording import COLUMNS, FORMAT
from windtunnel.sim.cost.profile import load_profile
from windtunnel.sim.engine.plan import StepShape

REPO_ROOT = Path(__file__).resolve().parent.parent
LIVE = REPO_ROOT.parent / "shared" / "live_vllm_cpu" / "data"

QUICK = ("--grid", "small", "--budget", "2s", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(tiny_config()), encoding="utf-8")
    return str(path.parent)


def test_measure_and_fit(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, profile = tmp_path / "out" / "steps.parquet", tmp_path / "profile.json"
    assert main(["measure", model, "-o", str(steps), *QUICK, "--max-model-len", "64", "--clock", "cpu"]) == 0
    said = capsys.readouterr()
    assert "decode" in said.out
    assert f"wrote {steps}" in said.err
    assert main(["fit", str(steps), "-o", str(profile), "--quiet", "--provenance", "gpu=none"]) == 0
    told = load_profile(profile).describe()["provenance"]
    assert (told["model"], told["engine"], told["clock"]) == ("tiny", "windtunnel torch executor", "cpu")
    assert told["gpu"] == "none", "what the command line says wins"
    assert told["tables"] == ["steps.parquet"]
    assert told["form"]["padded"] is False, "the torch executor has no CUDA graphs"
    assert len(told["model_config"]) == 16


def test_too_little_time_for_a_fit_is_said_and_can_be_made_up_for(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are so slow that the time is over after a few, none of which was seen twice."""
    from windtunnel.executor.torch_executor import TorchExecutor

    execute, slow_s = TorchExecutor.execute, 0.1

    def slowly(self: TorchExecutor, plan: Any) -> Any:
        time.sleep(slow_s)
        return execute(self, plan)

    monkeypatch.setattr(TorchExecutor, "execute", slowly)
    steps = tmp_path / "steps.parquet"
    arguments = ["measure", model, "-o", str(steps), *QUICK, "--max-model-len", "64", "--clock", "wall"]
    assert main([*arguments, "--budget", "1s"]) == 0
    said = capsys.readouterr()
    assert "a fit needs at least 10 different shapes" in said.err
    assert "--resume --budget 5m" in said.err
    assert "windtunnel fit" not in said.err
    kinds = [line for line in said.out.splitlines() if " ms " in line]
    assert kinds
    assert all(line.endswith(" –") for line in kinds), "one sample has no spread"
    assert main(["fit", str(steps), "-o", str(tmp_path / "p.json")]) == 3

    slow_s = 0.0
    assert main([*arguments, "--budget", "60s", "--target", "0.5", "--resume"]) == 0
    assert f"next: windtunnel fit {steps}" in capsys.readouterr().err
    assert not partial_path(steps).exists()
    assert main([*arguments, "--resume"]) == 2
    assert "is finished" in capsys.readouterr().err


def test_json_says_all_that_the_file_does(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tmp_path / "steps.parquet"
    assert main(["measure", model, "-o", str(steps), *QUICK, "--json", "-q", "--num-gpu-blocks", "40"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert not said.err
    assert told["num_gpu_blocks"] == 40
    assert sum(kind["samples"] for kind in told["kinds"].values()) == len(read_step_table(steps))
    assert told["num_measured_points"] == sum(kind["steps"] for kind in told["kinds"].values())
    assert told["is_complete"] == (told["num_measured_points"] == told["num_grid_points"])


def test_a_table_is_not_written_over_unless_asked(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps.parquet"
    steps.write_text("precious")
    assert main(["measure", model, "-o", str(steps), *QUICK]) == 2
    assert "--force" in capsys.readouterr().err
    assert steps.read_text() == "precious"
    partial_path(steps).write_text("stale")
    assert main(["measure", model, "-o", str(steps), *QUICK, "--force", "-q"]) == 0
    assert len(read_step_table(steps)) > 10


def test_ctrl_c_says_how_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windtunnel.executor.torch_executor import TorchExecutor

    execute, num_steps = TorchExecutor.execute, 0

    def interrupted(self: TorchExecutor, plan: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 250:
            raise KeyboardInterrupt
        return execute(self, plan)

    monkeypatch.setattr(TorchExecutor, "execute", interrupted)
    steps = tmp_path / "steps.parquet"
    arguments = ["measure", model, "-o", str(steps), *QUICK, "--budget", "60s"]
    assert main(arguments) == 130
    said = capsys.readouterr().err
    assert f"kept in {partial_path(steps)}" in said
    assert "--resume" in said
    assert not steps.exists()
    assert main([*arguments, "--resume", "--budget", "0s", "-q"]) == 0
    assert len(read_step_table(steps)) > 50


def test_a_stop_before_anything_was_measured_leaves_nothing_behind(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windtunnel.executor.torch_executor import TorchExecutor

    def interrupted(self: TorchExecutor, plan: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchExecutor, "execute", interrupted)
    steps = tmp_path / "out" / "steps.parquet"
    assert main(["measure", model, "-o", str(steps), *QUICK]) == 130
    said = capsys.readouterr().err
    assert "stopped before anything was measured" in said
    assert "--resume" not in said
    assert not list(steps.parent.iterdir())


def test_a_table_does_not_take_the_place_of_the_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(model) / "config.json"
    before = config.read_text()
    assert main(["measure", model, "-o", str(config), "--force", *QUICK]) == 2
    assert "it is read for that" in capsys.readouterr().err
    assert config.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executor", "sim"], "'sim' is not one of torch, triton"),
        (["--grid", "huge"], "'huge' is not one of small, default, full"),
        (["--clock", "sun"], "'sun' is not one of wall, cpu"),
        (["--budget", "soon"], "soon"),
        (["--target", "2"], "2 is not above 0 and below 1"),
        (["--clock", "cpu", "--num-threads", "2"], "cpu sees one thread only"),
        (["--executor", "triton"], "needs a MODEL"),
        (["llama-3.1-8b", "--executor", "triton", "--clock", "cpu"], "no processor time"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "must be at least max_num_seqs"),
        (["--max-model-len", "100000"], "100000"),
        (["--dtype", "int3"], "int3"),
        (["no-such-model"], "unknown model 'no-such-model'"),
        (["./no-such-model"], "cannot read model ./no-such-model"),
        (["deepseek-v3"], "cannot be computed"),
        (["--resume"], "nothing to resume"),
        (["--resume", "--force"], "give one of them"),
        (["-o", "."], "it is a folder"),
        (["-o", "d.csv"], "d.csv is written as Parquet: name it d.parquet (or .pq)"),
        (["-o", "d"], "d is written as Parquet: name it d.parquet"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "--budget", "1s", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_torch_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["measure", "--budget", "1s"]) == 2
    assert "pip install 'windtunnel[executor]'" in capsys.readouterr().err


def test_progress_says_how_far_and_how_long() -> None:
    line = progress_line(Progress(90, 60, 12, 300, 30.0, 120.0, 75.0))
    assert "60 of 90 steps seen, 12 known well enough, about 1 min 15 s left" in line
    assert line.count("#") == 6


# ------------------------------------------------------------------ recordings


def recording(path: Path, num_steps: int = 60, *, gap_ns: int = 50_000, recorder_ns: int = 0, **header: Any) -> Path:
    """Steps of decodes: decided in 300 us, computed in 10 ms and more, booked in 200 us."""
    lines = [json.dumps({"format": FORMAT, "version": 1, "vllm": "0.32.0", "model": "a", "device": "x", **header})]
    now_ns = 0
    for step in range(num_steps):
        begin_ns = now_ns
        seqs = 1 + step % 12
        ends = (begin_ns + 300_000, begin_ns + 300_000, begin_ns + 10_300_000 + 100_000 * seqs)
        now_ns = ends[2] + 200_000
        values = dict.fromkeys(COLUMNS, 0)
        shape = StepShape(seqs, 100 * seqs, 0, 0, 0, 0, seqs)
        times = (begin_ns, *ends, now_ns)
        names = ("schedule_begin_ns", "schedule_end_ns", "execute_begin_ns", "execute_end_ns", "update_end_ns")
        values |= {"step": step, **shape._asdict(), **dict(zip(names, times, strict=True)), "recorder_ns": recorder_ns}
        lines.append(json.dumps(values))
        now_ns += gap_ns + recorder_ns + (10**9 if step % 10 == 9 else 0)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_hosts_time_is_part_of_a_step_if_wanted(tmp_path: Path) -> None:
    path = recording(tmp_path / "steps.jsonl", recorder_ns=30_000)
    alone, whole = (recorded_step_table([path], include_host=host) for host in (False, True))
    assert whole.step_s - alone.step_s == pytest.approx(np.full(60, 300e-6 + 200e-6 + 50e-6)), "without the recorder"
    assert alone.step_s[:2] == pytest.approx([0.0101, 0.0102])
    assert loop_gap_s(read_recorded_steps(path)) == pytest.approx(50e-6), "waiting for requests is no part of a step"
    assert (alone.provenance["includes_host"], whole.provenance["includes_host"]) == (False, True)
    assert whole.provenance["engine"] == "vLLM 0.32.0"
    assert whole.provenance["source"] == "recorded"


def test_steps_that_overlap_hide_the_host(tmp_path: Path) -> None:
    path = recording(tmp_path / "steps.jsonl", gap_ns=-5_000_000, num_steps=9)
    alone, whole = (recorded_step_table([path], include_host=host) for host in (False, True))
    assert whole.step_s[1:] == pytest.approx(alone.step_s[1:])


def test_several_recordings_become_one_table(tmp_path: Path) -> None:
    paths = [recording(tmp_path / f"{number}.jsonl", date=f"day {number}") for number in (1, 2)]
    table = read_steps(paths)
    assert len(table) == 120
    assert table.provenance["tables"] == ["1.jsonl", "2.jsonl"]
    assert table.provenance["date"] == ["day 1", "day 2"]
    assert table.provenance["model"] == "a"


@pytest.mark.parametrize("other", [{"model": "b"}, {"dtype": "float16"}, {"vllm": "0.20.0"}])
def test_different_deployments_are_not_mixed(
    other: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        recording(tmp_path / "1.jsonl", dtype="bfloat16"),
        recording(tmp_path / "2.jsonl", **{"dtype": "bfloat16", **other}),
    )
    with pytest.raises(StepTableError, match="fit each deployment by itself"):
        recorded_step_table([first, second], include_host=True)
    assert main(["fit", str(first), str(second), "-o", str(tmp_path / "p.json")]) == 3
    assert "2.jsonl has" in capsys.readouterr().err


def test_fit_takes_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, profile = recording(tmp_path / "steps.jsonl"), tmp_path / "profile.json"
    assert main(["fit", str(path), "-o", str(profile), "-q"]) == 0
    with_host = load_profile(profile).step_time_s(StepShape(4, 400, 0, 0, 0, 0, 4))
    assert main(["fit", str(path), "-o", str(profile), "-q", "--no-include-host"]) == 0
    without = load_profile(profile).step_time_s(StepShape(4, 400, 0, 0, 0, 0, 4))
    assert without == pytest.approx(0.0104, rel=1e-3)
    assert with_host == pytest.approx(0.0104 + 0.00055, rel=1e-3)
    capsys.readouterr()
    assert main(["fit", str(path), "--where", "tp=4", "-o", str(profile)]) == 2
    assert "no columns to choose by" in capsys.readouterr().err


def test_a_flag_for_recordings_has_no_effect_on_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    table = recorded_step_table([recording(tmp_path / "steps.jsonl")], include_host=False)
    csv = tmp_path / "steps.csv"
    pd.DataFrame({**table.shapes._asdict(), "step_s": table.step_s}).to_csv(csv, index=False)
    assert main(["fit", str(csv), "-o", str(tmp_path / "p.json"), "--include-host"]) == 0
    assert "--include-host has no effect" in capsys.readouterr().err


def test_a_recording_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepTableError, match="no steps"):
        recorded_step_table([recording(tmp_path / "steps.jsonl", num_steps=0)], include_host=True)
    with pytest.raises(StepTableError, match="name at least one"):
        recorded_step_table([], include_host=True)
    (tmp_path / "broken.jsonl").write_text("nonsense\n")
    with pytest.raises(StepTableError, match="line 1"):
        read_steps([tmp_path / "broken.jsonl"])


@pytest.mark.skipif(not LIVE.exists(), reason="no recordings of a live vLLM beside the repository")
def test_live_runs_of_a_real_vllm_are_read_with_their_host_time() -> None:
    folder = LIVE / "Q2" / "a_seq"
    alone, whole = (recorded_step_table([folder], include_host=host) for host in (False, True))
    added_s = whole.step_s - alone.step_s
    assert 0.3e-3 < np.median(added_s) < 1.5e-3, "the notes say 0.3-1.6 ms for the scheduler, and the loop is about 0.1"
    assert alone.provenance["tables"] == ["Q2/a_seq"]


# ------------------------------------------------------------------ provenance


def test_what_several_tables_say_becomes_one() -> None:
    told = merged(
        [("a", {"model": "m", "date": 1, "gpu": None}), ("b", {"date": 2, "gpu": "H100"}), ("c", {"date": 1})]
    )
    assert told == {"model": "m", "date": [1, 2], "gpu": "H100"}


def test_the_drivers_name_of_a_card_becomes_ours() -> None:
    assert gpu_name("NVIDIA H100 80GB HBM3") == gpu_name("h100")
    assert gpu_name("cpu: AMD EPYC") is None
    assert gpu_name(None) is None


@pytest.mark.parametrize(
    ("origin", "largest"),
    [
        ({}, 512),
        ({"max_graph_tokens": 0}, 0),
        ({"enforce_eager": True, "cudagraph_capture_sizes": [1, 2]}, 0),
        ({"enforce_eager": False, "cudagraph_capture_sizes": [1, 2, 64]}, 64),
        ({"cudagraph_mode": "NONE"}, 0),
    ],
)
def test_the_largest_graph_follows_from_the_provenance(origin: dict[str, Any], largest: int) -> None:
    assert max_graph_tokens(origin) == largest
