"""Decisions of two engines side by side: planted differences are found at their step, and explained."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO_ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.calibrate.diff import Compared, Decision, Side, compare, diff, likely_reasons
from windtunnel.calibrate.diff_sources import Recording, read_recording, saved_decisions, simulated
from windtunnel.calibrate.diff_text import as_plain, as_text
from windtunnel.cli.main import main
from windtunnel.executor.vllm_plugin.recording import Added, StepDetail, StepLog, StepState, StepTimes
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.simulate import RequestTooLarge, run
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

LIVE = REPO_ROOT.parent / "shared" / "live_vllm_cpu" / "data"
COST = AffineCost(base_s=0.01, token_s=1e-4)
CONFIG = SchedulerConfig(
    max_num_seqs=6, max_num_batched_tokens=48, max_model_len=96, block_size=4, num_gpu_blocks=41, watermark=0.0
)
PROMPTS = (30, 9, 40, 17, 25, 33, 8, 21, 38, 12)
OUTPUTS = (20, 31, 9, 26, 14, 18, 40, 11, 22, 30)


def load(gap_ns: int = 15_000_000, prompts: tuple[int, ...] = PROMPTS, outputs: tuple[int, ...] = OUTPUTS) -> Workload:
    return workload([gap_ns * number for number in range(len(prompts))], prompts, outputs)


def stream(config: SchedulerConfig = CONFIG, requests: Workload | None = None) -> list[Decision]:
    return list(simulated(requests or load(), System(config, COST)))


def first_unlike(left: list[Decision], right: list[Decision]) -> int:
    """By the plain definition: the first step in which somebody gets something else."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        told = [(each.tokens, each.admitted, each.preempted, each.num_held_blocks) for each in (one, other)]
        if told[0] != told[1]:
            return number
    raise AssertionError("nothing differs")


def sides(left: SchedulerConfig = CONFIG, right: SchedulerConfig = CONFIG) -> tuple[Side, Side]:
    return Side("ours", left), Side("theirs", right)


def found(left: list[Decision], right: list[Decision], configs: tuple[Side, Side]) -> tuple[int, list[str], str]:
    compared = compare(left, right)
    assert compared.first is not None
    return compared.first.number, likely_reasons(compared.first, *configs), as_text(compared, *configs)


def test_equal_streams_say_how_many_steps_were_compared() -> None:
    decisions = stream()
    compared = compare(decisions, stream())
    assert (compared.num_steps, compared.first) == (len(decisions), None)
    assert any(each.preempted for each in decisions)  # there is something to be told apart
    assert f"the same decisions in {len(decisions)} steps" in as_text(compared, *sides())
    assert diff(decisions, decisions) is None


def test_an_altered_step_is_found_where_it_is_and_no_reason_is_made_up() -> None:
    decisions = stream()
    place = 37
    tokens = decisions[place].tokens
    assert tokens is not None
    altered = [*decisions]
    altered[place] = decisions[place]._replace(tokens=(*tokens[:-1], (tokens[-1][0], tokens[-1][1] + 1)))
    number, reasons, text = found(decisions, altered, sides())
    assert number == place
    assert [reason.partition(":")[0] for reason in reasons] == ["none found"]
    assert f"first difference: step {place}, after {place} equal ones" in text


def test_a_pool_one_block_smaller_shows_where_it_first_matters() -> None:
    smaller = replace(CONFIG, num_gpu_blocks=40)
    left, right = stream(), stream(smaller)
    number, reasons, text = found(left, right, sides(CONFIG, smaller))
    assert number == first_unlike(left, right)
    assert reasons[0].startswith("pool: num_gpu_blocks is 41 and 40")
    before = [each[number].before for each in (left, right)]
    assert before[0] is not None
    assert before[1] is not None
    assert before[1].num_free_blocks == (before[0].num_free_blocks or 0) - 1
    assert "num_gpu_blocks: 41 | 40" in text


def test_a_smaller_budget_is_named_with_what_each_side_spent() -> None:
    smaller = replace(CONFIG, max_num_batched_tokens=32)
    left, right = stream(), stream(smaller)
    number, reasons, _ = found(left, right, sides(CONFIG, smaller))
    assert number == first_unlike(left, right)
    assert reasons[0].startswith("budget: theirs has none left")
    assert "theirs 32 of 32" in reasons[0]


def test_fewer_seats_are_named() -> None:
    fewer = replace(CONFIG, max_num_seqs=2)
    left, right = stream(), stream(fewer)
    number, reasons, _ = found(left, right, sides(CONFIG, fewer))
    assert number == first_unlike(left, right)
    assert reasons[0].startswith("seats: theirs has none left")


def test_a_setting_that_shows_nowhere_else_is_still_named() -> None:
    cautious = replace(CONFIG, watermark=0.2, scheduler_reserve_full_isl=False)
    _, reasons, _ = found(stream(), stream(cautious), sides(CONFIG, cautious))
    assert any("scheduler_reserve_full_isl is True and False" in reason for reason in reasons)


def test_a_rule_of_another_release_is_named_as_such() -> None:
    new = replace(CONFIG, long_prefill_token_threshold=16)
    old = replace(new, long_prefill_spares_lone_request=False)
    left, right = stream(new), stream(old)
    number, reasons, _ = found(left, right, sides(new, old))
    assert number == first_unlike(left, right) == 0
    assert reasons[0].startswith("version rule: long_prefill_spares_lone_request is True and False; ")


def test_an_arrival_seen_later_is_told_with_its_distance() -> None:
    requests = load()
    late = requests.arrival_ns.copy()
    left = stream(requests=requests)
    step = next(each for each in left if any(row == 4 for row, _ in each.admitted or ()))
    assert step.time_ns is not None
    late[4] = step.time_ns + 1
    late[5:] = late[5:].clip(min=late[4])
    right = stream(requests=replace(requests, arrival_ns=late))
    number, reasons, _ = found(left, right, sides())
    assert number == first_unlike(left, right)
    assert reasons[0].startswith("arrival: request 4 ")
    assert reasons[0].endswith("is there for ours, and theirs sees it one step later")


def test_swapped_arrivals_are_told_by_the_place_in_the_queue() -> None:
    same = (20, 20, 20, 20)
    crowded = load(0, (40, *same), (3, 5, 6, 7, 8))
    left = stream(requests=crowded)

    def swapped(row: int) -> int:
        return {2: 3, 3: 2}.get(row, row)

    def renamed(pairs: tuple[tuple[int, int], ...] | None) -> tuple[tuple[int, int], ...]:
        return tuple((swapped(row), value) for row, value in pairs or ())

    right = []
    for each in stream(requests=load(0, (40, *same), (3, 5, 7, 6, 8))):
        assert each.before is not None
        running = tuple(one._replace(request=swapped(one.request)) for one in each.before.running)
        before = each.before._replace(running=running, waiting=tuple(map(swapped, each.before.waiting)))
        right.append(each._replace(tokens=renamed(each.tokens), admitted=renamed(each.admitted), before=before))
    number, reasons, _ = found(left, right, sides())
    assert number == first_unlike(left, right)
    assert reasons[0].startswith("order of the waiting: place ")
    assert "request 2 for ours and request 3 for theirs" in reasons[0]


def test_a_side_that_ends_early_is_no_equal_one() -> None:
    decisions = stream()
    number, reasons, text = found(decisions[:-3], decisions, sides())
    assert number == len(decisions) - 3
    assert reasons == [
        f"ours has no step {number}, theirs goes on: one side has fewer requests, shorter answers or an earlier "
        "horizon, or was cut off"
    ]
    assert "left has no such step" in text


def test_all_steps_are_listed_if_asked_for_and_the_first_ones_counted() -> None:
    decisions = stream()
    altered = [each._replace(num_running=99) if each.number in (5, 9) else each for each in decisions]
    assert compare(decisions, altered, all_steps=True).differing == ((5, ("num_running",)), (9, ("num_running",)))
    assert compare(decisions, altered).num_steps == 6
    cut = compare(decisions, altered, max_steps=5)
    assert (cut.num_steps, cut.first, cut.is_cut) == (5, None, True)
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        compare(decisions, altered, max_steps=0)


def test_only_what_both_sides_know_is_compared() -> None:
    decisions = stream()
    assert diff(decisions, [Decision(each.number, batch=each.batch) for each in decisions]) is None
    assert diff(decisions, [Decision(each.number) for each in decisions]) is None


def test_the_plain_data_is_json_and_holds_both_plans() -> None:
    smaller = replace(CONFIG, num_gpu_blocks=40)
    compared = compare(stream(), stream(smaller))
    told = json.loads(json.dumps(as_plain(compared, *sides(CONFIG, smaller), labels=[f"r{i}" for i in range(10)])))
    first = told["first_difference"]
    assert told["settings_that_differ"] == {"num_gpu_blocks": [41, 40]}
    assert (told["is_equal"], first["step"]) == (False, told["num_steps_compared"] - 1)
    assert first["left"]["before"]["num_free_blocks"] == first["right"]["before"]["num_free_blocks"] + 1
    assert first["left"]["tokens"][0][0].startswith("r")


# ------------------------------------------------------------------ streams


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=10),
    st.integers(0, 50_000_000),
    st.booleans(),
)
def test_the_same_simulation_decides_the_same(lengths: list[tuple[int, int]], gap_ns: int, is_async: bool) -> None:
    prompts, outputs = zip(*lengths, strict=True)
    system = System(replace(CONFIG, async_scheduling=is_async), COST)
    requests = load(gap_ns, prompts, outputs)
    compared = compare(simulated(requests, system), simulated(requests, system))
    assert compared.first is None
    assert compared.num_steps == len(run(requests, system.config, COST).replicas[0].steps)


def test_a_stream_that_is_left_ends_its_simulation() -> None:
    num_threads = threading.active_count()
    decisions = simulated(load(0, (5,) * 500, (90,) * 500), System(CONFIG, COST))
    next(decisions)
    decisions.close()  # type: ignore[attr-defined]
    assert threading.active_count() == num_threads


def test_what_a_simulation_raises_is_raised_to_the_reader() -> None:
    with pytest.raises(RequestTooLarge, match="needs 6 KV blocks"):
        list(simulated(load(0, (20,), (2,)), System(replace(CONFIG, num_gpu_blocks=4), COST)))
    with pytest.raises(ValueError, match="2 replicas"):
        simulated(load(), System(CONFIG, COST, num_replicas=2))


def test_a_saved_run_is_compared_by_its_batches_and_preemptions() -> None:
    saved = list(saved_decisions(run(load(), CONFIG, COST).replicas[0]))
    assert diff(stream(), saved) is None
    altered = [each._replace(preempted=(3,)) if each.number == 20 else each for each in saved]
    divergence = diff(stream(), altered)
    assert divergence is not None
    assert (divergence.number, divergence.fields) == (20, ("preempted",))


# ------------------------------------------------------------------ recordings


def recorded(
    path: Path,
    config: SchedulerConfig = CONFIG,
    *,
    requests: Workload | None = None,
    with_requests: bool = True,
    change: Callable[..., Any] | None = None,
) -> tuple[Path, list[Decision]]:
    """A file of the recorder that holds our own decisions, with instants as an engine has them."""
    requests = requests or load()
    decisions = stream(config, requests)
    names = [f"cmpl-{row}" for row in range(len(requests))]
    header = {name: getattr(config, name) for name in SchedulerConfig.__dataclass_fields__}
    log = StepLog(path, header, 100)
    told: set[int] = set()
    start_ns = 5_000_000_000
    for each, later in zip(decisions, [*decisions[1:], None], strict=True):
        assert each.time_ns is not None
        assert each.shape is not None
        assert each.before is not None
        # Decisions that the simulation takes at once come one after the other in an engine.
        overlap_ns = 100 if each.number and decisions[each.number - 1].time_ns == each.time_ns else 0
        begin_ns = start_ns + each.time_ns + overlap_ns
        end_ns = begin_ns + 2_000 if later is None or later.time_ns is None else start_ns + later.time_ns
        present = [one.request for one in each.before.running] + list(each.before.waiting)
        added = [
            Added(names[row], int(requests.num_prompt_tokens[row]), begin_ns - 50, begin_ns - 40)
            for row in sorted(present)
            if row not in told
        ]
        told.update(present)
        computed = {one.request: one.num_computed_tokens for one in each.before.running} | dict(each.admitted or ())
        plan = [(names[row], num_tokens, computed[row]) for row, num_tokens in each.tokens or ()]
        detail = StepDetail(plan, [names[row] for row in each.preempted or ()], added)
        if change is not None:
            detail = change(each.number, detail)
        state = StepState(
            each.num_running or 0, 0, config.num_usable_blocks - (each.num_held_blocks or 0), each.num_preempted or 0
        )
        last_ns = max(begin_ns + 20, end_ns - 10)
        times = StepTimes(begin_ns, begin_ns + 10, begin_ns + 20, last_ns, last_ns)
        log.write(times, each.shape, 0, state, 0, detail if with_requests else None)
    log.close()
    return path, decisions


def replayed(recording: Recording, config: SchedulerConfig = CONFIG) -> Compared:
    assert recording.workload is not None
    ours = simulated(recording.workload, System(config, ConstantCost(1.0)), executor=recording.executor())
    return compare(ours, recording.decisions)


def test_a_recording_is_met_step_by_step_with_its_own_requests(tmp_path: Path) -> None:
    path, decisions = recorded(tmp_path / "steps.jsonl")
    recording = read_recording(path)
    assert recording.workload is not None
    assert recording.config == CONFIG
    assert recording.workload.num_output_tokens.tolist() == list(OUTPUTS)
    compared = replayed(recording)
    assert compared.first is None, as_text(compared, *sides())
    assert compared.num_steps == len(decisions) > 50


@pytest.mark.parametrize("gap_ns", [0, 15_000_000, 400_000_000])
def test_a_recording_of_steps_that_overlap_is_met(tmp_path: Path, gap_ns: int) -> None:
    config = replace(CONFIG, async_scheduling=True, num_gpu_blocks=31)
    path, decisions = recorded(tmp_path / "steps.jsonl", config, requests=load(gap_ns))
    recording = read_recording(path)
    assert recording.config == config
    compared = replayed(recording, config)
    assert compared.first is None, as_text(compared, *sides(config, config))
    assert compared.num_steps == len(decisions)


def test_one_changed_step_of_a_recording_is_found(tmp_path: Path) -> None:
    def change(number: int, detail: StepDetail) -> StepDetail:
        return detail._replace(preempted=[detail.requests[0][0]]) if number == 23 else detail

    recording = read_recording(recorded(tmp_path / "steps.jsonl", change=change)[0])
    compared = replayed(recording)
    assert compared.first is not None
    assert compared.first.number == 23
    assert "preempted" in compared.first.fields


def test_a_recording_without_requests_is_compared_by_shapes(tmp_path: Path) -> None:
    path, decisions = recorded(tmp_path / "steps.jsonl", with_requests=False)
    recording = read_recording(path)
    assert recording.workload is None
    assert diff(decisions, recording.decisions) is None
    lines = path.read_text().splitlines()
    step = json.loads(lines[31])
    lines[31] = json.dumps(step | {"num_free_blocks": step["num_free_blocks"] - 1})
    path.write_text("\n".join(lines) + "\n")
    divergence = diff(decisions, read_recording(path).decisions)
    assert divergence is not None
    assert (divergence.number, divergence.fields) == (30, ("num_held_blocks",))


def test_an_empty_recording_is_refused(tmp_path: Path) -> None:
    StepLog(tmp_path / "steps.jsonl", {}, 1).close()
    with pytest.raises(ValueError, match="there are no steps in it"):
        read_recording(tmp_path / "steps.jsonl")


@pytest.mark.skipif(not LIVE.is_dir(), reason="needs the recorded live runs")
@pytest.mark.parametrize("name", ["Q2/d_poisson110", "QB2/e_preempt"])
def test_a_live_run_of_vllm_is_met_in_every_decision_and_queue(name: str) -> None:
    recording = read_recording(LIVE / name)
    assert recording.workload is not None
    assert recording.config is not None
    system = System(recording.config, ConstantCost(1.0))
    ours = list(simulated(recording.workload, system, executor=recording.executor()))
    assert diff(ours, recording.decisions) is None
    assert [(each.time_ns, each.before) for each in ours] == [
        (each.time_ns, each.before) for each in recording.decisions
    ]


@pytest.mark.skipif(not LIVE.is_dir(), reason="needs the recorded live runs")
def test_a_changed_step_of_a_live_run_is_found(tmp_path: Path) -> None:
    shutil.copytree(LIVE / "QB2" / "e_preempt", tmp_path / "server" / "run")
    shutil.copy(LIVE / "QB2" / "engine_config.json", tmp_path / "server")
    path = tmp_path / "server" / "run" / "sched.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    steps = [line for line in lines if line.get("det")]
    steps[100]["det"] = [*steps[100]["det"][1:], steps[100]["det"][0]]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    recording = read_recording(path.parent)
    assert recording.config is not None
    compared = replayed(recording, recording.config)
    assert compared.first is not None
    assert (compared.first.number, compared.first.fields) == (100, ("tokens",))


# ------------------------------------------------------------------ the command

SCENARIO = """\
schema_version = 1
name = "small"

[deployment]
num_gpu_blocks_override = 60

[engine]
max_num_seqs = 8
max_num_batched_tokens = 128
max_model_len = 512
async_scheduling = false

[workload]
num_requests = 20
input = "uniform:low=10,high=300"
output = 20
request_rate = 20

[cost]
kind = "constant"
step_s = "10ms"
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return str(path)


def test_two_configurations_of_ours_and_the_exit_code(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", scenario, "--against", "max_num_seqs=8"]) == 0
    assert "no difference: the same decisions in" in capsys.readouterr().out
    assert main(["diff", scenario, "--against", "max-num-batched-tokens=64; max_num_seqs=4", "--json"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert told["settings_that_differ"] == {"max_num_seqs": [8, 4], "max_num_batched_tokens": [128, 64]}
    assert told["first_difference"]["likely_reasons"][0].startswith("budget: ")


def test_flags_of_simulate_change_both_sides(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", scenario, "--num-prompts", "3", "--max-num-seqs", "2", "--against", "max_num_seqs=8"]) == 5
    assert "max_num_seqs: 2 | 8" in capsys.readouterr().out
    assert main(["diff", scenario, "--max-num-seqs", "2", "--against", "max_num_seqs=8", "--max-steps", "1"]) == 0
    assert "the same decisions in 1 step; the comparison was cut there" in capsys.readouterr().out


def test_a_saved_run_is_compared(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "saved")
    assert main(["simulate", scenario, "-q", "-o", folder]) == 0
    assert main(["diff", scenario, "--against", folder]) == 0
    assert main(["diff", scenario, "--against", folder, "--seed", "5"]) == 5
    assert f"the saved run ({folder})" in capsys.readouterr().out


def test_a_recording_needs_no_scenario_and_flags_change_its_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, decisions = recorded(tmp_path / "steps.jsonl")
    assert main(["diff", "--against", str(path)]) == 0
    assert f"the same decisions in {len(decisions)} steps" in capsys.readouterr().out
    assert main(["diff", "--against", str(path), "--num-gpu-blocks-override", "40"]) == 5
    told = capsys.readouterr().out
    assert "num_gpu_blocks: 40 | 41" in told
    assert "  - pool: num_gpu_blocks is 40 and 41" in told


def test_what_cannot_be_compared_is_refused_with_the_remedy(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", scenario, "--against", "nothing"]) == 2
    assert "neither vllm, nor a file or folder that exists, nor KEY=VALUE" in capsys.readouterr().err
    assert main(["diff", scenario, "--against", "data_parallel_size=2"]) == 2
    assert "set data_parallel_size to 1" in capsys.readouterr().err
    assert main(["diff", scenario, "--against", "foo=64"]) == 2
    told = capsys.readouterr().err
    assert "--against: unknown setting 'foo'; windtunnel schema --markdown lists all settings" in told
    assert main(["diff", scenario, "--against", "max_num_seq=64"]) == 2
    assert "unknown setting 'max_num_seq'; did you mean max_num_seqs or " in capsys.readouterr().err
    (tmp_path / "broken.jsonl").write_text("{}\n")
    assert main(["diff", "--against", str(tmp_path / "broken.jsonl")]) == 3
    assert "expected the header of a recording" in capsys.readouterr().err
    path, _ = recorded(tmp_path / "steps.jsonl", with_requests=False)
    assert main(["diff", "--against", str(path)]) == 2
    assert "the recording does not tell its requests: name the scenario that was run" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_is_said_how_to_install_it(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", scenario, "--against", "vllm"]) == 2
    assert "pip install 'windtunnel[vllm]'" in capsys.readouterr().err


def test_the_example_of_the_document_is_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (REPO_ROOT / "docs" / "diff.md").read_text()
    (shown,) = re.findall(r"```toml\n(.*?)```", document, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", document, re.DOTALL)
    (command,) = re.findall(r"`windtunnel (diff small-pool.toml [^`]*)`", document)
    (tmp_path / "small-pool.toml").write_text(shown)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 5
    assert capsys.readouterr().out == printed
