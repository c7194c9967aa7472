"""The recorder of a real vLLM, as far as it goes without one: options, composition, file, and the reader."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.calibrate.recorded_steps import TABLE_COLUMNS, read_recorded_steps, recorded_table
from windtunnel.executor.vllm_plugin.recorder import RecorderOptions, RecordingScheduler
from windtunnel.executor.vllm_plugin.recording import COLUMNS, FORMAT, StepComposer, StepLog, StepState, StepTimes
from windtunnel.executor.vllm_plugin.shapes import StepShapes, shape_of
from windtunnel.sim.engine.plan import StepShape

DECODES = StepShape(3, 300, 0, 0, 0, 0, 3)
MIXED = StepShape(1, 101, 1, 20, 5, 310, 1)
STATE = StepState(num_running=3, num_waiting=1, num_free_blocks=7, num_preempted=0)


def output(num_tokens: dict[str, int] | None = None, **more: Any) -> Any:
    """A SchedulerOutput with nothing in it but what is given."""
    num_tokens = num_tokens or {}
    cached = {"req_ids": [], "num_computed_tokens": [], "resumed_req_ids": set(), "all_token_ids": {}}
    return SimpleNamespace(
        num_scheduled_tokens=num_tokens,
        total_num_scheduled_tokens=sum(num_tokens.values()),
        scheduled_new_reqs=more.get("new", []),
        scheduled_cached_reqs=SimpleNamespace(**{**cached, **more.get("cached", {})}),
        scheduled_spec_decode_tokens=more.get("drafts", {}),
        finished_req_ids=more.get("finished", set()),
        preempted_req_ids=more.get("preempted", set()),
    )


def new(request_id: str, num_prompt: int, computed: int = 0) -> Any:
    return SimpleNamespace(
        req_id=request_id, prompt_token_ids=[1] * num_prompt, prefill_token_ids=None, num_computed_tokens=computed
    )


def running(**computed: int) -> dict[str, Any]:
    return {"req_ids": list(computed), "num_computed_tokens": list(computed.values())}


# ------------------------------------------------------------------ options


def test_the_options_have_defaults_and_come_from_their_own_section() -> None:
    assert RecorderOptions.from_additional_config({"windtunnel": {"gpu": "H100"}}) == RecorderOptions()
    given = {"windtunnel_recorder": {"directory": "there", "flush_steps": 1}}
    assert RecorderOptions.from_additional_config(given) == RecorderOptions(directory="there", flush_steps=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"directory": ""}, r"directory must be a path, got ''"),
        ({"flush_steps": 0}, r"flush_steps must be a whole number of at least 1, got 0"),
        ({"flush_steps": True}, r"flush_steps must be .*, got True"),
        ({"scheduler": "Scheduler"}, r"scheduler must be a class as module\.Class"),
        ({"detail": "yes"}, r"detail must be true or false, got 'yes'"),
        ({"path": "x"}, r"unknown path: allowed are directory, flush_steps, scheduler, detail"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"additional_config\.windtunnel_recorder.*{message}"):
        RecorderOptions.from_additional_config({"windtunnel_recorder": wrong})


# ------------------------------------------------------------------ what a step computes


@given(st.data())
def test_the_composition_is_the_one_that_the_simulated_executor_sees(data: st.DataObject) -> None:
    """Random batches that chunk prompts, decode, preempt, resume and finish; two independent counts of each step."""
    composer, shapes = StepComposer(), StepShapes()
    known: dict[str, int] = {}
    computed: dict[str, int] = {}
    waiting: list[str] = []
    finished: set[str] = set()
    for step in range(data.draw(st.integers(1, 12))):
        fresh = [f"{step}-{i}" for i in range(data.draw(st.integers(0, 2)))]
        known.update((each, data.draw(st.integers(1, 30))) for each in fresh)
        new_reqs = [new(each, known[each], data.draw(st.integers(0, known[each] - 1))) for each in fresh]
        resumed, waiting = waiting, []
        before = {**computed, **dict.fromkeys(resumed, 0)}
        tokens = {each: data.draw(st.integers(1, max(1, known[each] - done))) for each, done in before.items()}
        tokens |= {each.req_id: known[each.req_id] - each.num_computed_tokens for each in new_reqs}
        cached = {
            "req_ids": list(before),
            "num_computed_tokens": list(before.values()),
            "resumed_req_ids": set(resumed),
            "all_token_ids": {each: [1] * known[each] for each in resumed},
        }
        decided = output(tokens, new=new_reqs, cached=cached, finished=finished)
        assert composer.shape(decided) == shape_of(shapes.grants(decided))
        computed = {each: before.get(each, 0) + num for each, num in tokens.items()}
        computed |= {each.req_id: known[each.req_id] for each in new_reqs}
        known.update((each, known[each] + 1) for each, done in computed.items() if done == known[each])
        leaving = {each: data.draw(st.sampled_from(["stays"] * 4 + ["ends", "preempted"])) for each in computed}
        finished = {each for each, fate in leaving.items() if fate == "ends"}
        waiting = [each for each, fate in leaving.items() if fate == "preempted"]
        computed = {each: done for each, done in computed.items() if leaving[each] == "stays"}


def test_verifying_drafts_is_a_chunk_that_yields_a_token_for_each() -> None:
    composer = StepComposer()
    assert composer.shape(output({"a": 10}, new=[new("a", 10)])) == StepShape(0, 0, 1, 10, 0, 55, 1)
    drafted = output({"a": 3}, cached=running(a=10), drafts={"a": [7, 8]})
    assert composer.shape(drafted) == StepShape(0, 0, 1, 3, 10, 36, 3)
    assert composer.shape(output({"a": 1}, cached=running(a=12))) == StepShape(1, 13, 0, 0, 0, 0, 1)


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    composer = StepComposer()
    assert composer.shape(output({"a": 1}, new=[new("a", 1)])) == StepShape(0, 0, 1, 1, 0, 1, 1)


# ------------------------------------------------------------------ around a scheduler


class Decides:
    """A scheduler with three steps in it, one of which computes nothing."""

    def add_request(self, request: Any) -> None:
        self.waiting.append(request.request_id)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.running: list[str] = ["a"]
        self.waiting: list[str] = []
        self.engine = SimpleNamespace(pool=SimpleNamespace(num_free=5))
        self.is_down = False
        self.outputs = [
            output({"a": 4}, new=[new("a", 4)]),
            output(finished={"b"}),
            output({"a": 1}, cached=running(a=4), preempted={"c"}),
        ]

    def schedule(self) -> Any:
        return self.outputs.pop(0)

    def update_from_output(self, scheduler_output: Any, tokens: Any) -> Any:
        return tokens

    def shutdown(self) -> None:
        self.is_down = True


def scheduler(tmp_path: Path, base: str = "Decides", **options: Any) -> Any:
    section = {"directory": str(tmp_path), "scheduler": f"{__name__}.{base}", **options}
    config = SimpleNamespace(additional_config={"windtunnel_recorder": section})
    made: Any = RecordingScheduler(config, SimpleNamespace(num_blocks=6))
    return made


def run_all(decides: Any) -> None:
    while decides.outputs:
        assert decides.update_from_output(decides.schedule(), "tokens") == "tokens"


def test_steps_that_compute_something_are_recorded(tmp_path: Path) -> None:
    decides = scheduler(tmp_path)
    assert isinstance(decides, Decides)
    run_all(decides)
    decides.shutdown()
    assert decides.is_down
    (path,) = tmp_path.iterdir()
    recorded = read_recorded_steps(path)
    table = recorded.table()
    assert (recorded.notes, recorded.header["num_gpu_blocks"]) == ((), 6)
    assert recorded.header["scheduler"].endswith(".Decides")
    assert list(table["num_decode_seqs"]) == [0, 1]
    assert list(table["decode_context_tokens"]) == [0, 5]
    assert list(table["num_preempted"]) == [0, 1]
    assert list(table["num_free_blocks"]) == [5, 5]
    assert (table["recorder_s"] > 0).all()


def test_with_details_each_step_names_its_requests_and_those_queued_before_it(tmp_path: Path) -> None:
    decides = scheduler(tmp_path, detail=True)
    begin_ns = time.monotonic_ns()
    arrival = SimpleNamespace(request_id="a", num_prompt_tokens=4, arrival_time=time.time() - 1.0)
    decides.add_request(arrival)
    run_all(decides)
    decides.shutdown()
    (path,) = tmp_path.iterdir()
    first, last = (json.loads(line) for line in path.read_text().splitlines()[1:])
    assert (first["requests"], first["preempted"]) == ([["a", 4, 0]], [])
    assert (last["requests"], last["preempted"], last["added"]) == ([["a", 1, 4]], ["c"], [])
    ((name, num_prompt, arrival_ns, added_ns),) = first["added"]
    assert (name, num_prompt) == ("a", 4)
    assert begin_ns <= added_ns <= first["schedule_begin_ns"]
    assert added_ns - arrival_ns == pytest.approx(1e9, abs=5e7)
    assert read_recorded_steps(path).num_steps == 2


def test_without_details_a_step_has_the_columns_and_nothing_else(tmp_path: Path) -> None:
    decides = scheduler(tmp_path)
    run_all(decides)
    decides.shutdown()
    (path,) = tmp_path.iterdir()
    assert [tuple(json.loads(line)) for line in path.read_text().splitlines()[1:]] == [COLUMNS] * 2


def test_what_was_written_is_there_once_the_engine_is_idle(tmp_path: Path) -> None:
    decides = scheduler(tmp_path, flush_steps=1000)
    (path,) = tmp_path.iterdir()
    decides.update_from_output(decides.schedule(), None)
    assert read_recorded_steps(path).num_steps == 0
    decides.running.clear()
    decides.update_from_output(decides.schedule(), None)
    assert read_recorded_steps(path).num_steps == 1
    decides.shutdown()


def test_several_decisions_may_be_under_way_at_once(tmp_path: Path) -> None:
    decides = scheduler(tmp_path)
    decided = [decides.schedule() for _ in range(3)]
    for each in (decided[0], decided[2]):  # the one between was given up
        decides.update_from_output(each, None)
    decides.shutdown()
    (path,) = tmp_path.iterdir()
    table = read_recorded_steps(path).table()
    assert list(table["prefill_tokens"]) == [4, 0]
    assert table["gap_s"].isna().all()
    assert (table["step_s"] > 0).all()


def test_a_fault_in_recording_ends_the_recording_and_not_the_service(tmp_path: Path) -> None:
    decides = scheduler(tmp_path)
    decides.outputs[2] = output({"who": 2})
    run_all(decides)
    decides.shutdown()
    (path,) = tmp_path.iterdir()
    recorded = read_recorded_steps(path)
    assert recorded.num_steps == 1
    assert recorded.notes == ("the recorder stopped after 1 steps: KeyError: 'who'",)


def test_a_full_disk_does_not_keep_the_engine_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decides = scheduler(tmp_path)
    close = decides.step_log.close

    def full(stopped: str | None = None) -> None:
        close(stopped)
        raise OSError("no space left on device")

    monkeypatch.setattr(decides.step_log, "close", full)
    decides.shutdown()
    assert decides.is_down


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("Missing", r"Missing' cannot be imported"),
        ("output", r"must be a scheduler class"),
        ("RecordingScheduler", r"is the recorder itself"),
    ],
)
def test_a_scheduler_that_cannot_decide_is_refused(tmp_path: Path, base: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"windtunnel_recorder\.scheduler.*{message}"):
        scheduler(tmp_path, base)


# ------------------------------------------------------------------ file and reader


def write(path: Path, shapes: list[StepShape], starts_ns: list[int] | None = None) -> Path:
    """A recording of steps of 1 ms deciding, 10 ms executing and 2 ms booking, 20 ms apart."""
    log = StepLog(path, {"model": "m"}, flush_steps=1)
    for i, shape in enumerate(shapes):
        begin = (starts_ns or range(10**9, 10**12, 20_000_000))[i]
        at = [begin + ms * 1_000_000 for ms in (0, 1, 1, 11, 13)]
        log.write(StepTimes(*at), shape, 0, STATE, 5_000)
    log.close()
    return path


def edited(path: Path, edit: Callable[[list[str]], None]) -> Path:
    lines = path.read_text().split("\n")
    edit(lines)
    path.write_text("\n".join(lines))
    return path


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorded = read_recorded_steps(write(tmp_path / "a.jsonl", [MIXED, DECODES]))
    table = recorded.table()
    assert tuple(table.columns) == TABLE_COLUMNS
    assert [StepShape(*row) for row in table[list(StepShape._fields)].itertuples(index=False)] == [MIXED, DECODES]
    assert recorded.header["model"] == "m"
    assert table["begin_s"].tolist() == [0.0, 0.02]
    assert table["step_s"].tolist() == [0.01, 0.01]
    assert table["schedule_s"].tolist() == [0.001, 0.001]
    assert table["update_s"].tolist() == [0.002, 0.002]
    assert np.isnan(table["gap_s"][0])
    assert table["gap_s"][1] == 0.007
    assert table["recorder_s"].tolist() == [5e-6, 5e-6]


def test_where_steps_are_decided_ahead_a_step_lasts_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    ahead = [10**9, 10**9 + 4_000_000, 10**9 + 40_000_000]
    table = read_recorded_steps(write(tmp_path / "a.jsonl", [DECODES] * 3, ahead)).table()
    assert table["step_s"].tolist() == [0.01, 0.004, 0.01]
    assert table["gap_s"].isna().tolist() == [True, True, False]


def test_several_recordings_make_one_table(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [DECODES, MIXED]) for name in ("a.jsonl", "b.jsonl")]
    table = recorded_table(paths)
    assert table["recording"].tolist() == [str(paths[0])] * 2 + [str(paths[1])] * 2
    with pytest.raises(ValueError, match="name at least one"):
        recorded_table([])


def test_a_recording_may_be_compressed(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", [DECODES])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_recorded_steps(packed).table().equals(read_recorded_steps(plain).table())
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is not a whole gzip file"):
        read_recorded_steps(packed)


@given(num_cut=st.integers(1, 400))
def test_a_last_line_that_was_cut_off_is_left_out_and_noted(
    tmp_path_factory: pytest.TempPathFactory, num_cut: int
) -> None:
    path = write(tmp_path_factory.mktemp("cut") / "a.jsonl", [DECODES, MIXED])
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(num_cut, last - 1)])
    recorded = read_recorded_steps(path)
    if num_cut == 1:  # only the end of the line is missing
        assert (recorded.num_steps, recorded.notes) == (2, ())
    else:
        assert recorded.num_steps == 1
        assert recorded.notes == ("line 3, the last one, was cut off and is left out",)


def test_a_recording_without_steps_says_so(tmp_path: Path) -> None:
    recorded = read_recorded_steps(write(tmp_path / "a.jsonl", []))
    assert (recorded.num_steps, recorded.notes) == (0, ("there are no steps in it",))
    assert tuple(recorded.table().columns) == TABLE_COLUMNS


def with_value(name: str, value: Any) -> Callable[[list[str]], None]:
    def edit(lines: list[str]) -> None:
        line = json.loads(lines[2])
        if value is None:
            del line[name]
        else:
            line[name] = value
        lines[2] = json.dumps(line)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines.__setitem__(2, lines[2][:50]), r"line 3: not an object of JSON"),
        (lambda lines: lines.insert(2, ""), r"line 3: not an object of JSON"),
        (with_value("num_running", None), r"line 3: num_running missing"),
        (with_value("num_running", -1), r"line 3: num_running must be a whole number of at least 0, got -1"),
        (with_value("num_sampled", 1.5), r"line 3: num_sampled must be a whole number of at least 0, got 1\.5"),
        (with_value("num_decode_seqs", 0), r"line 3: a step computes at least one token"),
        (with_value("update_end_ns", 1), r"line 3: instants must not go back"),
        (with_value("step", 0), r"step must grow from step to step, got 0 after 0"),
        (lambda lines: lines.pop(0), r"line 1: expected the header of a recording"),
        (
            lambda lines: lines.__setitem__(0, f'{{"format":"{FORMAT}","version":9}}'),
            r"line 1: version 9 of the format",
        ),
    ],
)
def test_a_broken_recording_is_refused_with_its_file_and_line(
    tmp_path: Path, edit: Callable[[list[str]], None], message: str
) -> None:
    path = edited(write(tmp_path / "a.jsonl", [DECODES] * 3), edit)
    with pytest.raises(ValueError, match=rf"a\.jsonl.*{message}"):
        read_recorded_steps(path)


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no recording at .*none\.jsonl"):
        read_recorded_steps(tmp_path / "none.jsonl")


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [DECODES])
    with pytest.raises(FileExistsError):
        write(path, [MIXED])


def test_a_line_has_each_field_once(tmp_path: Path) -> None:
    line = write(tmp_path / "a.jsonl", [DECODES]).read_text().splitlines()[1]
    assert [name for name, _ in json.loads(line, object_pairs_hook=list)] == list(COLUMNS)


# ------------------------------------------------------------------ live runs


def live_run(folder: Path, **changed: Any) -> Path:
    """Two requests of 3 and 2 tokens: prefills, a preemption, a recomputation, a decode."""
    folder.mkdir(parents=True)
    decided = [  # computed (request, tokens, before); preempted
        ([["a", 3, 0], ["b", 1, 0]], []),
        ([["a", 1, 3], ["b", 1, 1]], []),
        ([["b", 1, 2]], [["a", 5, 4]]),
        ([["a", 4, 0]], []),
        ([["a", 1, 4]], []),
        ([["a", 1, 5]], []),
    ]
    events: list[dict[str, Any]] = [
        {"ev": "add", "t": 0.0, "arr": 0.0, "id": i, "prompt": n} for i, n in (("a", 3), ("b", 2))
    ]
    rows = ["i,t,tok,seqs,dec,pf,pairs,exec_ms,sched_ms,upd_ms,gap_ms,running,waiting,free_blocks,preempted"]
    with gzip.open(folder / "sched.jsonl.gz", "wt") as file:
        for i, (det, pre) in enumerate(decided):
            file.write(json.dumps({"i": i, "t": i * 0.1, "new": [], "pre": pre, "det": det}) + "\n")
            pairs = sum(num * before + num * (num + 1) // 2 for _, num, before in det)
            tokens = sum(num for _, num, _ in det)
            row = {"i": i, "t": 1 + i * 0.1, "tok": tokens, "seqs": len(det), "dec": 0, "pf": 0, "pairs": pairs}
            row |= {"exec_ms": 50, "sched_ms": 1, "upd_ms": 2, "gap_ms": 3, "running": 2, "waiting": 0}
            row |= {"free_blocks": 9, "preempted": len(pre)}
            rows.append(",".join(str(value) for value in (row | (changed if i == 1 else {})).values()))
        for event in events:
            file.write(json.dumps(event) + "\n")
    (folder / "steps.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_who_yields_a_token_in_a_live_run_follows_from_the_lengths(tmp_path: Path) -> None:
    table = read_recorded_steps(live_run(tmp_path / "run")).table()
    assert tuple(table.columns) == TABLE_COLUMNS
    found = [StepShape(*row) for row in table[list(StepShape._fields)].itertuples(index=False)]
    assert found == [
        StepShape(0, 0, 2, 4, 0, 7, 1),
        StepShape(1, 4, 1, 1, 1, 2, 2),
        StepShape(1, 3, 0, 0, 0, 0, 1),
        StepShape(0, 0, 1, 4, 0, 10, 0),
        StepShape(0, 0, 1, 1, 4, 5, 1),
        StepShape(1, 6, 0, 0, 0, 0, 1),
    ]
    assert table["step_s"].tolist() == [0.05] * 6
    assert np.allclose(np.diff(table["begin_s"]), 0.1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tok": 3}, r"step 1 has \(tokens, requests, pairs\) \(3, 2, 6\) in steps\.csv and \(2, 2, 6\)"),
        ({"i": 77}, r"steps\.csv has step 77, sched\.jsonl\.gz has not"),
        ({"exec_ms": ""}, r"steps\.csv, line 3: exec_ms must be a number of at least 0, got ''"),
        ({"waiting": 0.5}, r"steps\.csv, line 3: waiting must be a whole number of at least 0, got '0\.5'"),
    ],
)
def test_files_of_a_live_run_that_contradict_each_other_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_recorded_steps(live_run(tmp_path / "run", **changed))


def test_a_live_run_needs_both_of_its_files(tmp_path: Path) -> None:
    (live_run(tmp_path / "run") / "sched.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no sched\.jsonl\.gz"):
        read_recorded_steps(tmp_path / "run")


@pytest.mark.parametrize(("run", "num_steps"), [("Q2/a_seq", 1542), ("Q2/d_poisson110", 690), ("QB2/e_preempt", 929)])
def test_live_runs_of_a_real_server_add_up(shared: Path, run: str, num_steps: int) -> None:
    recorded = read_recorded_steps(shared / "live_vllm_cpu" / "data" / run)
    table = recorded.table()
    assert len(table) == num_steps
    assert table["num_sampled"].sum() == recorded.header["out_tokens"]
    if table["num_preempted"].sum() == 0:
        assert table["prefill_tokens"].sum() == recorded.header["prompt_tokens"]
    else:
        assert table["prefill_tokens"].sum() > recorded.header["prompt_tokens"]
    assert all(later > earlier for earlier, later in pairwise(table["begin_s"]))
