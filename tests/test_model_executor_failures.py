"""What an executor that computes a model believes of its cache after something went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tiny_model import TinyEngine, tiny_executor

from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.simulated import SimExecutor

ROOMY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=96, block_size=4, num_gpu_blocks=512)
PROMPT = list(range(3, 36))
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


def fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def simulated_first() -> tuple[TinyEngine, Any]:
    """An engine whose prefix index knows the prompt, and an executor that never computed it."""
    engine = TinyEngine(ROOMY, tiny_executor(ROOMY))
    real = engine.executor
    engine.use(SimExecutor(ConstantCost(1e-3)))
    engine.add(PROMPT, GREEDY)
    while engine.step(made_up=[7]):
        pass
    engine.use(real)
    return engine, real


def drop_all(engine: TinyEngine) -> None:
    for request in list(engine.scheduler.requests()):
        engine.scheduler.abort(request)


@pytest.mark.parametrize("broken", [lambda real: (real, "_compute"), lambda real: (real._builder, "build")])
def test_prefix_hits_that_could_not_be_computed_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[Any], tuple[Any, str]]
) -> None:
    engine, real = simulated_first()
    engine.add(PROMPT, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(*broken(real), fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    drop_all(engine)
    before = real.num_caught_up_tokens
    again = engine.add(PROMPT, GREEDY)
    engine.step()
    assert again.num_cached_tokens == 32
    assert real.num_caught_up_tokens - before == 32


def test_an_adoption_that_fails_leaves_nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real = simulated_first()
    engine.use(SimExecutor(ConstantCost(1e-3)))
    engine.add(PROMPT, GREEDY)
    engine.step(made_up=[7])
    with monkeypatch.context() as patch:
        patch.setattr(real, "_compute", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.use(real)
    drop_all(engine)
    again = engine.add(PROMPT, GREEDY)
    engine.executor = real
    engine.step()
    assert again.num_cached_tokens == 32
    assert real.num_caught_up_tokens == 32
