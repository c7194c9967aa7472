"""Tables of measured steps that must not be fitted as they are: mixed, contradictory, impossible, mislabelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from windtunnel.calibrate.origins import max_graph_tokens
from windtunnel.calibrate.step_tables import StepTable, StepTableError, read_step_table, read_steps
from windtunnel.cli.main import main
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.profile import load_profile, save_profile
from windtunnel.sim.engine.plan import StepShape


def steps(number: int = 24) -> Any:
    """Decodes and, in every third step, a chunk, with the times of a simple law."""
    rows = []
    for turn in range(number):
        decodes, new = 1 + turn % 8, 16 * (turn % 3 == 0) * (1 + turn)
        pairs = new * (new + 1) // 2
        rows.append((decodes, decodes * (100 + turn), int(new > 0), new, 0, pairs, decodes + int(new > 0)))
    frame = pd.DataFrame(rows, columns=StepShape._fields)
    frame["step_s"] = 5e-3 + 1e-5 * (frame["num_decode_seqs"] + frame["prefill_tokens"])
    return frame


def written(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path, index=False)
    return path


def with_metadata(frame: pd.DataFrame, path: Path, metadata: dict[bytes, bytes]) -> Path:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def changed(row: int, **values: Any) -> Any:
    frame: Any = steps()
    for column, value in values.items():
        frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value
    return frame


# ------------------------------------------------------------------ deployments


@pytest.mark.parametrize("column", ["tp", "TP", "tensor_parallel_size", "gpu", "model", "dtype", "vllm_version"])
def test_deployments_in_one_table_are_not_mixed(column: str, tmp_path: Path) -> None:
    path = written(steps().assign(**{column: ["1", "8"] * 12}), tmp_path / "steps.csv")
    with pytest.raises(StepTableError) as error:
        read_step_table(path)
    assert f"several deployments (column {column}), which must not be mixed" in str(error.value)
    assert f"(--where {column}=VALUE): 1, 8" in str(error.value)
    assert len(read_step_table(path, where={column: "8"})) == 12


def test_the_command_refuses_mixed_deployments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(steps().assign(gpu=["H100", "L40S"] * 12), tmp_path / "steps.csv")
    assert main(["fit", str(path), "-o", str(tmp_path / "p.json")]) == 3
    assert "--where gpu=VALUE): H100, L40S" in capsys.readouterr().err


def test_a_column_of_one_deployment_is_part_of_the_provenance(tmp_path: Path) -> None:
    frame = steps().assign(tp=4.0, gpu_name="H100", vllm_version=0.32, run="a", worker_id=range(24))
    told = read_step_table(written(frame, tmp_path / "steps.csv")).provenance
    assert told == {"source": "steps.csv", "tensor_parallel_size": 4, "gpu": "H100", "vllm": "0.32"}


def test_tables_whose_columns_name_different_deployments_are_not_mixed(tmp_path: Path) -> None:
    paths = [written(steps().assign(tp=size), tmp_path / f"{size}.csv") for size in (1, 8)]
    with pytest.raises(StepTableError, match=r"8\.csv has tensor_parallel_size 8, but .*1\.csv has 1"):
        read_steps(paths)


@pytest.mark.parametrize("values", [[4, 8], [4.0, 8.0], ["4", "8"]])
@pytest.mark.parametrize("text", ["4", "4.0"])
def test_a_number_is_chosen_however_it_is_written(values: list[Any], text: str, tmp_path: Path) -> None:
    path = written(steps().assign(tp=values * 12), tmp_path / "steps.csv")
    assert len(read_step_table(path, where={"tp": text})) == 12


def test_tables_that_contradict_each_other_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = steps()
    one = written(frame, tmp_path / "one.csv")
    near = written(frame.assign(step_s=1.5 * frame["step_s"]), tmp_path / "near.csv")
    far = written(frame.assign(step_s=10 * frame["step_s"]), tmp_path / "far.csv")
    assert read_steps([one, near]).remarks == ()
    (remark,) = read_steps([one, far]).remarks
    assert f"{far} and {one} contradict each other: steps of the same 24 shapes take 10 times as long" in remark
    assert main(["fit", str(one), str(far), "-o", str(tmp_path / "p.json")]) == 0
    assert "contradict each other" in capsys.readouterr().err


def test_a_table_that_is_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(steps(), tmp_path / "steps.csv")
    with pytest.raises(StepTableError, match=r"steps\.csv is given twice"):
        read_steps(["steps.csv", path])


# ------------------------------------------------------------------ times


def test_two_columns_of_times_must_agree(tmp_path: Path) -> None:
    frame = steps()
    agree = written(frame.assign(step_ms=1e3 * frame["step_s"]), tmp_path / "agree.csv")
    assert read_step_table(agree).step_s == pytest.approx(frame["step_s"].to_numpy())
    contradict: Any = frame.assign(step_ms=1e3 * frame["step_s"])
    contradict.loc[3, "step_ms"] *= 7
    with pytest.raises(StepTableError, match="row 4: step_ms, as a time beside step_s, must be the same time"):
        read_step_table(written(contradict, tmp_path / "contradict.csv"))


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1e3, "s, which is unusual, as if they were written in a unit a thousand times shorter"),
        (1e6, "a million times shorter"),
        (1e9, "a billion times shorter"),
        (1e-6, "e-09 s, which is unusual, as if they were written in a unit a million times longer"),
        (1e12, "which is unusual"),
    ],
)
def test_times_that_no_step_takes_are_told_of_with_the_likely_unit(factor: float, said: str, tmp_path: Path) -> None:
    frame = steps()
    path = written(frame.assign(step_s=factor * frame["step_s"]), tmp_path / "steps.csv")
    (remark,) = read_step_table(path).remarks
    assert remark.startswith(f"{path}: half of the steps take ")
    assert said in remark


def test_usual_times_are_not_remarked_on(tmp_path: Path) -> None:
    for name, factor in (("step_s", 1.0), ("step_ms", 1e3), ("step_ns", 1e9)):
        frame = steps()
        frame[name] = factor * frame.pop("step_s")
        assert read_step_table(written(frame, tmp_path / "steps.csv")).remarks == ()


def test_the_command_warns_of_the_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = steps()
    path = written(frame.assign(step_s=1e3 * frame["step_s"]), tmp_path / "steps.csv")
    assert main(["fit", str(path), "-o", str(tmp_path / "p.json")]) == 0
    assert "warning: " in (said := capsys.readouterr().err)
    assert "a thousand times shorter" in said


# ------------------------------------------------------------------ impossible steps


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            changed(3, num_prefill_seqs=0),
            "row 4: prefill_tokens must be at least num_prefill_seqs, and 0 where that is",
        ),
        (changed(3, prefill_tokens=0), "row 4: prefill_tokens must be at least num_prefill_seqs"),
        (changed(1, prefill_context_tokens=5), "row 2: prefill_context_tokens must be 0 without a chunk, got 5"),
        (changed(1, prefill_pairs=5), "row 2: prefill_pairs must be"),
        (changed(3, prefill_pairs=1), "row 4: prefill_pairs must be at least prefill_tokens"),
        (changed(3, prefill_pairs=10**7), "row 4: prefill_pairs must be at least prefill_tokens, and at most"),
        (changed(1, decode_context_tokens=1), "row 2: decode_context_tokens must be at least num_decode_seqs"),
        (changed(1, num_decode_seqs=0, prefill_tokens=1, num_prefill_seqs=1, prefill_pairs=1), "and 0 where that is 0"),
        (changed(1, num_sampled=9), "row 2: num_sampled must be at most the sequences of the step, got 9"),
        (changed(1, decode_context_tokens=1e18), "row 2: decode_context_tokens must be at most 1,099,511,627,776"),
        (changed(1, decode_context_tokens="9" * 30), "row 2: decode_context_tokens must be at most 1,099,511,627,776"),
        (changed(1, decode_context_tokens="9" * 400), "decode_context_tokens"),
        (changed(1, decode_context_tokens=np.inf), "row 2: decode_context_tokens must be a whole number"),
        (changed(1, num_sampled=None), "row 2: num_sampled must be a number"),
    ],
)
def test_a_step_that_cannot_be_is_refused_with_its_row(frame: pd.DataFrame, message: str, tmp_path: Path) -> None:
    with pytest.raises(StepTableError) as error:
        read_step_table(written(frame, tmp_path / "steps.csv"))
    assert message in str(error.value)


def test_counts_are_checked_wherever_steps_come_from() -> None:
    columns = np.array([[4, 2, 0, 0, 0, 0, 4]]).T
    with pytest.raises(StepTableError, match="decode_context_tokens must be at least num_decode_seqs"):
        StepTable(StepShape(*columns), np.array([0.01]))


# ------------------------------------------------------------------ what is left out


def test_only_rows_that_are_marked_as_the_reference_are_left_out(tmp_path: Path) -> None:
    for marks, kept in (
        ([np.nan] * 24, 24),
        ([True, False] * 12, 12),
        (["True", "false"] * 12, 12),
        ([1, 0] * 12, 12),
        ([1.0, np.nan] * 12, 12),
    ):
        path = written(steps().assign(is_reference=marks), tmp_path / "steps.csv")
        assert len(read_step_table(path)) == kept, marks[:2]
    with pytest.raises(StepTableError, match="is_reference must be true or false, got 'maybe'"):
        read_step_table(written(steps().assign(is_reference="maybe"), tmp_path / "steps.csv"))


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("name", ["steps.pq", "STEPS.PARQUET", "steps.parquet"])
def test_parquet_is_told_by_every_usual_ending(name: str, tmp_path: Path) -> None:
    steps().to_parquet(tmp_path / name)
    assert len(read_step_table(tmp_path / name)) == 24


@pytest.mark.parametrize(
    "metadata", [b"{", b"\xff", b"[1]", b"3", b'{"tensor_parallel_size": NaN}', b"[" * 100_000, b""]
)
def test_damaged_metadata_are_refused(metadata: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_metadata(steps(), tmp_path / "steps.parquet", {b"windtunnel": metadata})
    assert main(["fit", str(path), "-o", str(tmp_path / "p.json")]) == 3
    said = capsys.readouterr().err
    assert f"{path}: the file's metadata hold under 'windtunnel' where a table comes from, and that is no JSON" in said
    assert "Traceback" not in said


def test_metadata_of_somebody_else_say_nothing(tmp_path: Path) -> None:
    path = with_metadata(steps(), tmp_path / "steps.parquet", {b"other": b"\xff", b"pandas": b"{"})
    assert read_step_table(path).provenance == {"source": "steps.parquet"}


def test_a_file_is_named_once_in_a_message(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("a,b\n1,2\n")
    for where in ({}, {"tp": "4"}):
        with pytest.raises(StepTableError) as error:
            read_step_table(tmp_path / "steps.csv", where=where)
        assert str(error.value).count("steps.csv") == 1


@pytest.mark.parametrize(
    ("origin", "largest"),
    [
        ({"max_graph_tokens": "256"}, 256),
        ({"enforce_eager": "true"}, 0),
        ({"enforce_eager": "False"}, 512),
        ({"cudagraph_capture_sizes": "[1, 2, 64]"}, 64),
        ({"cudagraph_capture_sizes": 8}, 8),
    ],
)
def test_facts_that_are_written_as_text_count_as_what_they_say(origin: dict[str, Any], largest: int) -> None:
    assert max_graph_tokens(origin) == largest


def test_a_fact_of_the_wrong_kind_names_the_flag_that_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, profile = written(steps(), tmp_path / "steps.csv"), tmp_path / "p.json"
    assert main(["fit", str(path), "-o", str(profile), "--provenance", "cudagraph_capture_sizes=many"]) == 2
    said = capsys.readouterr().err
    assert "cudagraph_capture_sizes must be a whole number" in said
    assert "--max-graph-tokens N" in said


# ------------------------------------------------------------------ what is not written over


def test_fit_does_not_write_over_its_own_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = written(steps(), tmp_path / "steps.csv")
    before = table.read_bytes()
    (tmp_path / "link.json").symlink_to(table)
    (tmp_path / "hard.json").hardlink_to(table)
    for output in ("steps.csv", str(table), "link.json", "hard.json"):
        for force in ([], ["--force"]):
            assert main(["fit", "steps.csv", "-o", output, *force]) == 2
            assert "it is read for that; name another file" in capsys.readouterr().err
    assert table.read_bytes() == before


def test_fit_writes_over_a_profile_and_over_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, output = str(written(steps(), tmp_path / "steps.csv")), tmp_path / "out.json"
    for text in ("precious", json.dumps({"kind": "letter"}), "[]", ""):
        output.write_text(text)
        assert main(["fit", table, "-o", str(output)]) == 2
        assert f"{output} exists and is no profile" in capsys.readouterr().err
        assert output.read_text() == text
    assert main(["fit", table, "-o", str(output), "--force", "-q"]) == 0
    assert load_profile(output).name == "fitted"
    save_profile(ConstantCost(step_s=0.01), output)
    assert main(["fit", table, "-o", str(output), "-q"]) == 0
    assert load_profile(output).name == "fitted"


SIMULATE = (
    *("simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--num-prompts", "3", "--input-len", "10", "-q"),
    *("--output-len", "2"),
)


def test_a_report_does_not_take_the_place_of_what_it_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = (
        '[deployment]\nmodel = "llama-3.1-8b"\ngpu = "h100"\n[workload]\nnum_requests = 3\ninput = 9\noutput = 2\n'
    )
    Path("mine.toml").write_text(scenario)
    assert main(["simulate", "mine.toml", "--html", "./mine.toml"]) == 2
    assert "it is read for that" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == scenario
    save_profile(ConstantCost(step_s=0.01), "p.json")
    assert main([*SIMULATE, "--profile", "p.json", "--html", "p.json"]) == 2
    assert main(["validate", "mine.toml", "--endpoint", "http://127.0.0.1:1", "--html", "mine.toml"]) == 2
    assert load_profile("p.json").name == "constant"


def test_a_report_does_not_take_the_place_of_a_part_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SIMULATE, "-o", "run"]) == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    for name in before:
        assert main(["report", "run", "--html", f"run/{name}"]) == 2
        assert "it is a part of the run in run" in capsys.readouterr().err
        assert main(["trace", "run", "-o", f"run/{name}"]) == 2
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before
    for _ in range(2):
        assert main(["report", "run", "--html", "run/report.html"]) == 0
