"""The Python interface: simulate, look at the tables, save and load."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import windtunnel as wt
from windtunnel.rundir import OutputError, check_can_write


def small(**changes: Any) -> dict[str, Any]:
    """An engine-only scenario of 40 requests; changes replace or extend its sections."""
    scenario: dict[str, Any] = {
        "name": "small",
        "deployment": {"num_gpu_blocks_override": 200},
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024},
        "workload": {
            "num_requests": 40,
            "input": "uniform:low=10,high=300",
            "output": "uniform:low=1,high=60",
            "request_rate": 5,
        },
        "cost": {"kind": "constant", "step_s": "10ms"},
    }
    for section, values in changes.items():
        scenario[section] = {**scenario.get(section, {}), **values} if isinstance(values, dict) else values
    return scenario


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_public_names_are_sorted_and_all_there() -> None:
    assert sorted(wt.__all__) == wt.__all__
    assert wt.__all__ == [name for name in dir(wt) if name != "__version__"]
    for name in wt.__all__:
        assert name == getattr(wt, name).__name__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        wt.simulat  # type: ignore[attr-defined] # noqa: B018


def test_importing_windtunnel_loads_nothing_heavy() -> None:
    heavy = ("torch", "triton", "plotly", "pandas", "scipy", "pyarrow", "pydantic", "numpy", "simpy", "typer")
    code = f"import sys, windtunnel; print(*[name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (wt.simulate(small(), seed=seed) for seed in (1, 1, 2))
    assert first.summary == again.summary
    assert first.requests.equals(again.requests)
    assert not first.requests.equals(other.requests)


def test_overrides_win_over_the_scenario() -> None:
    run = wt.simulate(small(), max_num_seqs=2, cost={"kind": "constant", "step_s": 0.02})
    assert run.records.replicas[0].max_num_seqs == 2
    assert {20_000_000} == set(run.steps.eval("end_ns - start_ns"))
    sources = {entry["key"]: entry["source"] for entry in run.resolved["settings"]}
    assert sources["max_num_seqs"] == "max_num_seqs="
    assert sources["step_s"] == "cost="
    assert sources["max_num_batched_tokens"] == "scenario argument"


def test_latencies_in_seconds_follow_from_the_records() -> None:
    run = wt.simulate(small(workload={"output": "uniform:low=1,high=3"}))
    table = run.requests
    assert table.ttft_s.tolist() == ((table.first_token_ns - table.arrival_ns) / 1e9).tolist()
    assert run.summary["mean_ttft_ms"] == pytest.approx(1000 * table.ttft_s.mean())
    assert run.summary["mean_e2el_ms"] == pytest.approx(1000 * table.e2el_s.mean())
    assert run.summary["mean_tpot_ms"] == pytest.approx(1000 * table.tpot_s.mean())
    assert (table.num_output_tokens == 1).tolist() == table.tpot_s.isna().tolist()
    assert (table.num_output_tokens == 1).any()


def test_what_never_happened_is_nan() -> None:
    run = wt.simulate(small(run={"horizon": "2s"}))
    unfinished = run.requests[run.requests.outcome == 1]
    assert len(unfinished) > 0
    assert unfinished.e2el_s.isna().all()
    assert math.isnan(unfinished.ttft_s.iloc[-1])


def test_requests_that_no_one_may_serve_are_counted_and_told() -> None:
    run = wt.simulate(small(engine={"max_model_len": 200}))
    long = run.requests.num_prompt_tokens >= 200
    assert 0 < long.sum() < 40
    assert long.sum() == run.summary["rejected"]
    assert any(
        f"{long.sum()} of 40 prompts have max_model_len (200) tokens or more" in text
        for text in run.resolved["warnings"]
    )


def test_a_saved_run_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    run = wt.simulate(small(slo={"objectives": ["ttft:p99<1ms"], "goodput": ["ttft:100"]}))
    run.save(tmp_path / "run")
    loaded = wt.load_run(tmp_path / "run")
    assert run.summary == loaded.summary
    assert run.slo_passed is False
    assert loaded.slo_passed is False
    assert run.resolved == loaded.resolved
    for name in ("requests", "steps", "spans", "preemptions", "drafts"):
        assert getattr(run, name).equals(getattr(loaded, name)), name
    assert run.saturation_request_throughput == loaded.saturation_request_throughput is not None
    assert loaded.records.end_ns == run.records.end_ns


def test_equal_runs_are_saved_as_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        wt.simulate(small(), seed=3).save(tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    expected = {"drafts", "preemptions", "requests", "spans", "steps", "workload"}
    assert {f"{name}.parquet" for name in expected} | {"summary.json", "scenario.resolved.json"} == set(
        files(tmp_path / "a")
    )


def test_saving_replaces_an_earlier_run_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wt.simulate(small(), seed=1).save(folder)
    before = files(folder)
    (folder / "notes.txt").write_text("mine")
    wt.simulate(small(), seed=2).save(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert before["summary.json"] != files(folder)["summary.json"]
    assert [folder] == list(tmp_path.iterdir()), "no scratch folder is left"


def test_a_folder_with_other_things_is_only_written_to_by_force(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    run = wt.simulate(small())
    with pytest.raises(OutputError, match="not empty and holds no earlier run"):
        run.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    run.save(tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert run.summary == wt.Run.load(tmp_path).summary


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(OutputError, match="cannot write"):
            check_can_write(folder)


def test_folders_of_a_report_are_made_and_go_again_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = wt.simulate(small())
    run.report(tmp_path / "a" / "b" / "report.html")
    run.trace(tmp_path / "a" / "c" / "trace.json")
    assert len(list((tmp_path / "a").rglob("*.*"))) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file/report\.html"):
        run.report(tmp_path / "file" / "report.html")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("reports.html.write_html", "reports.perfetto.write_trace", "rundir._write_table"):
        monkeypatch.setattr(f"windtunnel.{name}", full)
    for write in (run.report, run.trace, run.save):
        with pytest.raises(OutputError, match="No space left on device"):
            write(tmp_path / "new" / "deep" / "out")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_no_run_or_half_of_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(wt.RunUnreadable, match="there is no such folder"):
        wt.load_run(tmp_path / "none")
    with pytest.raises(wt.RunUnreadable, match=r"it has no scenario\.resolved\.json"):
        wt.load_run(tmp_path)
    wt.simulate(small()).save(tmp_path / "run")
    (tmp_path / "run" / "steps.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(wt.RunUnreadable, match="simulate it again"):
        wt.load_run(tmp_path / "run")


LABELS = ["a", 'b,"c"', "NA", "null", "", "zwei\nZeilen", "ä–\u2028", "007"]


@pytest.mark.parametrize("records_format", ["parquet", "csv"])
def test_a_run_in_either_format_is_the_same_when_it_is_loaded(tmp_path: Path, records_format: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"request_id": label, "arrival_s": n, "num_prompt_tokens": 9, "num_output_tokens": 1 + n % 3}
        for n, label in enumerate(LABELS)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = small(run={"horizon": "6.015s"})
    scenario["workload"] = {"trace": str(trace)}
    run = wt.simulate(scenario)
    run.save(tmp_path / "run", records_format=records_format)
    loaded = wt.load_run(tmp_path / "run")
    assert run.summary == loaded.summary
    for name in ("requests", "steps", "spans", "preemptions"):
        assert getattr(run, name).equals(getattr(loaded, name)), name
    assert loaded.requests.label.tolist() == LABELS
    assert {path.suffix for path in (tmp_path / "run").iterdir()} == {f".{records_format}", ".json"}


def test_a_run_without_requests_that_finished_or_preemptions_is_saved_as_csv(tmp_path: Path) -> None:
    run = wt.simulate(small(run={"horizon": "1ms"}))
    run.save(tmp_path / "run", records_format="csv")
    assert wt.load_run(tmp_path / "run").requests.equals(run.requests)


def test_saving_in_another_format_leaves_one_run_and_what_is_not_ours(tmp_path: Path) -> None:
    run = wt.simulate(small())
    run.save(tmp_path, records_format="csv")
    (tmp_path / "mine.csv").write_text("mine")
    run.save(tmp_path)
    assert [path.name for path in tmp_path.glob("*.csv")] == ["mine.csv"]
    assert len(list(tmp_path.glob("*.parquet"))) == 6
    (tmp_path / "requests.csv").write_text("mine too")
    run.save(tmp_path)
    assert (tmp_path / "requests.csv").read_text() == "mine too"
    with pytest.raises(ValueError, match='records_format must be "parquet" or "csv", got \'xlsx\''):
        run.save(tmp_path, records_format="xlsx")  # type: ignore[arg-type]


def test_the_saved_requests_can_be_read_without_windtunnel(tmp_path: Path) -> None:
    run = wt.simulate(small(engine={"max_model_len": 200}, workload={"output": "uniform:low=1,high=3"}))
    run.save(tmp_path / "a")
    run.save(tmp_path / "b", records_format="csv")
    parquet, csv = pd.read_parquet(tmp_path / "a" / "requests.parquet"), pd.read_csv(tmp_path / "b" / "requests.csv")
    assert list(parquet.columns) == list(csv.columns) == list(run.requests.columns)
    assert dict.fromkeys(parquet.outcome_name) == {"finished": None, "rejected": None}
    for table in (parquet, csv):
        assert table.e2el_s.dropna().mean() * 1000 == pytest.approx(run.summary["mean_e2el_ms"])
        assert table.label.isna().all()
        assert (table.ttft_s.isna() == (table.outcome_name == "rejected")).all()
    assert (
        pq.read_table(tmp_path / "a" / "requests.parquet")["tpot_s"].null_count
        == int(run.requests.tpot_s.isna().sum())
        > 0
    )


def test_labels_of_a_trace_come_through(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("request_id,arrival_s,num_prompt_tokens,num_output_tokens\na,0,10,2\nb,1,20,3\n")
    scenario = small()
    scenario["workload"] = {"trace": str(trace)}
    run = wt.simulate(scenario)
    assert run.requests[["label", "num_prompt_tokens"]].to_numpy().tolist() == [["a", 10], ["b", 20]]
    run.save(tmp_path / "run")
    assert wt.load_run(tmp_path / "run").requests.label.tolist() == ["a", "b"]


def test_a_loaded_run_makes_the_same_reports(tmp_path: Path) -> None:
    run = wt.simulate(small(slo={"objectives": ["ttft:p99<1s"]}))
    run.save(tmp_path / "run")
    loaded = wt.load_run(tmp_path / "run")
    assert run.text() == loaded.text()
    assert run.markdown() == loaded.markdown()
    for name, each in (("direct", run), ("loaded", loaded)):
        each.report(tmp_path / f"{name}.html")
        each.trace(tmp_path / f"{name}.json")
    assert (tmp_path / "direct.html").read_bytes() == (tmp_path / "loaded.html").read_bytes()
    assert (tmp_path / "direct.json").read_bytes() == (tmp_path / "loaded.json").read_bytes()


def test_the_utilisation_is_that_of_the_measured_saturation() -> None:
    run = wt.simulate(small(workload={"num_requests": 400}))
    offered = 399 / (np.ptp(run.records.requests.due_ns) / 1e9)
    assert run.summary["utilisation"] == pytest.approx(offered / run.saturation_request_throughput)
    assert wt.simulate(small(run={"saturation": False})).summary["utilisation"] is None
    closed = wt.simulate(small(workload={"max_concurrency": 4}))
    assert closed.saturation_request_throughput is None


def test_the_bundled_storm_preempts_as_real_vllm_did() -> None:
    """700 preemptions and 338,578 recomputed tokens: shared/vllm_golden/pressure, recorded from vLLM 0.32."""
    run = wt.simulate("preemption-storm")
    assert 700 == run.summary["preemptions"] == len(run.preemptions)
    assert run.summary["recomputed_prefill_tokens"] == 338_578


def test_overrides_do_not_change_what_the_caller_passed_and_their_order_does_not_matter() -> None:
    engine = {"max_num_seqs": 8}
    scenario = "preemption-storm"
    first = wt.simulate(scenario, engine=engine, max_num_seqs=2, num_requests=5)
    second = wt.simulate(scenario, max_num_seqs=2, num_requests=5, engine=engine)
    assert engine == {"max_num_seqs": 8}
    for run in (first, second):
        assert run.records.replicas[0].max_num_seqs == 2


def test_the_version_of_vllm_goes_by_the_flags_name_too() -> None:
    by_flag = wt.simulate(small(), engine="vllm-0.11")
    by_key = wt.simulate(small(), engine_version="vllm-0.11")
    assert by_flag.summary == by_key.summary
    assert by_flag.resolved["engine"] == "vLLM 0.11"


def test_the_json_holds_the_rate_that_was_configured_where_one_was() -> None:
    configured = wt.simulate(small())
    assert (configured.summary["request_rate"], configured.summary["burstiness"]) == (5, 1.0)
    assert configured.summary["offered_request_rate"] != 5
