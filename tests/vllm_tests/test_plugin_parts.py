"""Parts of the vLLM plug-ins that need no vLLM: options, clocks, shapes of steps, keys of blocks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from windtunnel.executor import vllm_plugin
from windtunnel.executor.vllm_plugin.clock import LateResult, VirtualClock, WallClock
from windtunnel.executor.vllm_plugin.engine import HashKeys, LiveEngine, exact_ns
from windtunnel.executor.vllm_plugin.options import SimOptions
from windtunnel.executor.vllm_plugin.shapes import StepShapes, shape_of
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.request import Request, Status

# ------------------------------------------------------------------ importing


def test_importing_the_plug_ins_imports_no_vllm() -> None:
    code = "import sys, windtunnel.executor, windtunnel.executor.vllm_plugin; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'VllmSchduler'"):
        vllm_plugin.VllmSchduler  # noqa: B018


# ------------------------------------------------------------------ options


def options(**given: Any) -> SimOptions:
    return SimOptions.from_additional_config({"windtunnel": given})


def test_options_of_others_do_not_matter() -> None:
    assert SimOptions.from_additional_config({"somebody": {"else": 1}}) == SimOptions()
    assert SimOptions.from_additional_config({}) == SimOptions()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"pace": "slow"}, r"additional_config\.windtunnel\.pace must be one of wall, virtual, got 'slow'"),
        ({"speed": "2"}, r"windtunnel\.speed must be a finite number above 0, got '2'"),
        ({"speed": float("inf")}, r"windtunnel\.speed must be a finite number above 0, got inf"),
        ({"speed": True}, r"windtunnel\.speed must be a finite number above 0, got True"),
        ({"pace": "virtual", "speed": 2.0}, r"windtunnel\.speed has no effect in virtual time, got 2\.0"),
        ({"num_gpu_blocks": 1}, r"windtunnel\.num_gpu_blocks must be a whole number of at least 2, got 1"),
        ({"async_scheduling": "yes"}, r"windtunnel\.async_scheduling must be true or false, got 'yes'"),
        ({"gpu": 100}, r"windtunnel\.gpu must be a string, got 100"),
        ({"cost": "roofline"}, r"windtunnel\.cost must be an object .*, got 'roofline'"),
        ({"cost": {"kind": "guess"}}, r"windtunnel\.cost\.kind must be one of roofline, .*, got 'guess'"),
        ({"cost": {"kind": "constant"}}, r"windtunnel\.cost lacks step_s, which constant needs"),
        ({"cost": {"kind": "constant", "step": 1}}, r"windtunnel\.cost has unknown step: constant allows step_s"),
        ({"cost": {"kind": "affine", "base_s": "1ms"}}, r"windtunnel\.cost\.base_s must be a finite number, got '1ms'"),
        ({"gpus": "H100"}, r"windtunnel has unknown gpus: allowed are cost, gpu, "),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_range(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        options(**given)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"cost": {"kind": "constant", "step_s": 0}}, r"windtunnel\.cost: step_s must be above 0 and finite, got 0"),
        ({"cost": {"kind": "profile", "path": "/nowhere.json"}}, r"windtunnel\.cost: .*nowhere\.json"),
        ({"cost": {"kind": "roofline", "gemm_flops": 2.0}}, r"windtunnel\.cost: RooflineFactors\.gemm_flops must be"),
    ],
)
def test_a_wrong_cost_is_named_when_it_is_made(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        options(**given).make_cost(SimpleNamespace(), 1, "auto")  # type: ignore[arg-type]


def test_an_unknown_gpu_is_named_with_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"windtunnel\.gpu: unknown GPU 'H1000'; nearest: .*H100"):
        options(gpu="H1000").gpu_spec("the roofline")
    with pytest.raises(ValueError, match=r"windtunnel\.gpu is missing, the roofline needs it"):
        options().gpu_spec("the roofline")


def test_a_given_cost_is_made() -> None:
    cost = options(cost={"kind": "affine", "base_s": 0.01, "token_s": 1e-4}).make_cost(None, 1, "auto")
    assert isinstance(cost, AffineCost)
    assert cost.step_time_s(StepShape(1, 10, 1, 9, 0, 45, 2)) == pytest.approx(0.011)


# ------------------------------------------------------------------ clocks


def test_virtual_time_passes_only_by_waiting() -> None:
    real = time.monotonic
    start = real()
    with VirtualClock() as clock:
        assert VirtualClock.current() is clock
        times = (time.time(), time.monotonic(), time.perf_counter(), time.monotonic_ns())
        time.sleep(3600.0)
        clock.wait_until_s(7200.0)
        clock.wait_until_s(10.0)
        assert clock.now_s() == 7200.0
        assert time.time() - times[0] == pytest.approx(7200.0, abs=1e-6)
        assert time.monotonic() - times[1] == pytest.approx(7200.0, abs=1e-6)
        assert time.perf_counter() - times[2] == pytest.approx(7200.0, abs=1e-6)
        assert time.monotonic_ns() - times[3] == 7200 * 10**9
    assert time.monotonic is real
    assert VirtualClock.current() is None
    assert real() - start < 60.0


def test_other_threads_keep_the_wall_clock() -> None:
    seen: list[float] = []

    def look() -> None:
        seen.append(time.monotonic())
        time.sleep(0.001)
        assert VirtualClock.current() is None

    start = time.monotonic()
    with VirtualClock():
        time.sleep(1e6)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen[0] - start < 1e5


def test_virtual_clocks_do_not_nest() -> None:
    with VirtualClock(), pytest.raises(RuntimeError, match="in force already"), VirtualClock():
        pass
    with VirtualClock():
        pass


def test_a_result_is_shown_when_its_time_has_come() -> None:
    clock = VirtualClock()
    late = LateResult("tokens", 2.5, clock)
    assert not late.done()
    assert late.result() == "tokens"
    assert late.done()
    assert clock.now_s() == 2.5


def test_the_wall_clock_waits_shorter_at_higher_speed() -> None:
    clock = WallClock(speed=1000.0)
    start = time.perf_counter()
    clock.wait_until_s(clock.now_s() + 10.0)
    assert 0.01 <= time.perf_counter() - start < 5.0


# ------------------------------------------------------------------ shapes


def message(
    scheduled: dict[str, int],
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, int] | None = None,
    resumed: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput: new (prompt, computed), cached and resumed requests with computed and known tokens."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=each, prompt_token_ids=[5] * prompt, prefill_token_ids=None, num_computed_tokens=done
            )
            for each, (prompt, done) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached or {}),
            num_computed_tokens=list((cached or {}).values()),
            resumed_req_ids=set(resumed or {}),
            all_token_ids={each: [5] * known for each, known in (resumed or {}).items()},
        ),
    )


def test_shapes_of_chunks_decodes_and_resumed_requests() -> None:
    shapes = StepShapes()
    first = shape_of(shapes.grants(message({"a": 8, "b": 3}, new={"a": (10, 0), "b": (19, 16)})))
    assert first == StepShape(0, 0, 2, 11, 16, 36 + 3 * 16 + 6, 1)
    second = shape_of(shapes.grants(message({"a": 2, "b": 1}, cached={"a": 8, "b": 19})))
    assert second == StepShape(1, 20, 1, 2, 8, 2 * 8 + 3, 2)
    third = shape_of(shapes.grants(message({"b": 20}, cached={"b": 1}, resumed={"b": 21})))
    assert third == StepShape(0, 0, 1, 20, 1, 20 + 210, 1)
    assert shape_of(shapes.grants(message({}, finished=("a", "b")))) == StepShape(0, 0, 0, 0, 0, 0, 0)


# ------------------------------------------------------------------ the engine under a live server


def engine(**knobs: Any) -> LiveEngine:
    return LiveEngine(SchedulerConfig(**{"num_gpu_blocks": 10, "block_size": 4, "max_model_len": 64, **knobs}))


def run(live: LiveEngine, num_steps: int) -> list[Request]:
    finished: list[Request] = []
    for _ in range(num_steps):
        finished += live.commit(live.schedule(0), 0)
    return finished


def test_an_answer_ends_where_the_sampler_says() -> None:
    live = engine()
    request = Request("a", 0, 5, 20)
    live.add(request)
    assert run(live, 3) == []
    live.end_after(request, 4)
    assert run(live, 1) == [request]
    assert request.num_emitted == 4
    assert live.usage() == 0.0


def test_a_paused_engine_serves_those_that_run_and_admits_nobody() -> None:
    live = engine()
    early, late = Request("a", 0, 5, 20), Request("b", 1, 5, 20)
    live.add(early)
    run(live, 1)
    live.admit(False)
    live.add(late)
    run(live, 2)
    assert (live.num_emitted_tokens(early), late.status) == (3, Status.WAITING)
    live.admit(True)
    run(live, 1)
    assert late.status == Status.RUNNING


def test_equal_hashes_are_found_again_until_they_are_forgotten() -> None:
    hashes = [bytes([i]) * 32 for i in range(3)]
    live = engine()
    for name in ("a", "b"):
        live.add(Request(name, 0, 13, 1, keys=HashKeys(hashes, may_look_up=True)))
        run(live, 1)
    refreshed = Request("c", 0, 13, 1, keys=HashKeys(hashes, may_look_up=False))
    live.add(refreshed)
    plan = live.schedule(0)
    assert plan.admissions[0].num_cached_tokens == 0
    assert not live.forget_prefixes(), "a request holds blocks"
    live.commit(plan, 0)
    order = live.pool.free_queue()
    assert live.forget_prefixes()
    assert live.pool.free_queue() == order
    assert live.pool.num_keys == 0
    live.add(Request("d", 0, 13, 1, keys=HashKeys(hashes, may_look_up=True)))
    assert live.schedule(0).admissions[0].num_cached_tokens == 0


def test_a_prefix_is_read_from_the_cache() -> None:
    hashes = [bytes([i]) * 32 for i in range(3)]
    live = engine()
    live.add(Request("a", 0, 13, 1, keys=HashKeys(hashes, may_look_up=True)))
    run(live, 1)
    live.add(Request("b", 0, 13, 1, keys=HashKeys(hashes, may_look_up=True)))
    assert live.schedule(0).admissions[0].num_cached_tokens == 12


def test_different_arrival_times_stay_different() -> None:
    import math

    time_s = 1.8e9 + 0.123
    times = [time_s]
    for _ in range(1000):
        times.append(math.nextafter(times[-1], math.inf))
    assert len({exact_ns(each) for each in times}) == len(times)
    assert [exact_ns(each) for each in times] == sorted(exact_ns(each) for each in times)
