"""The knobs of the what-if page: which settings can be turned, how far, and in which steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from windtunnel.ui.errors import BadQuestion

MAX_REQUESTS = 5_000
"""Most requests of one answer: an answer that takes longer than a look is none."""
MAX_REPLICAS = 16
ALL_AT_ONCE = "inf"
"""A request rate: all requests are due at time 0."""
MAX_TEXT = 400
"""Characters of a text that is typed in."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One control of the page."""

    name: str
    """Its key in the scenario file; ``input`` and ``output`` are the mean of that distribution."""
    group: str
    """Under which heading it stands."""
    label: str
    kind: str
    """"stops" (a slider over these values), "range" (a slider with steps), "choice", "switch", "number" or "text"."""
    help: str
    stops: tuple[float, ...] = ()
    low: float = 1
    high: float = 1
    step: float = 1
    choices: tuple[Any, ...] = ()
    unit: str = ""
    hidden: bool = False
    """Whether only a remedy turns it."""
    last: str = ""
    """A position of the slider behind its last stop, such as "inf" for all at once."""

    def for_page(self) -> dict[str, Any]:
        """What the page builds the control from."""
        return {name: getattr(self, name) for name in Knob.__slots__}

    def read(self, value: Any) -> Any:
        """The value as the scenario takes it.

        Raises BadQuestion for one of another type, out of range or not among the choices.
        """
        match self.kind:
            case "switch":
                return self._switch(value)
            case "choice":
                return self._choice(value)
            case "text":
                return self._text(value)
        if self.last and value == self.last:
            return value
        return self._number(value)

    def _switch(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self._complaint(value, "must be true or false")
        return value

    def _choice(self, value: Any) -> Any:
        if value not in self.choices or isinstance(value, bool):
            raise self._complaint(value, f"must be one of {', '.join(map(str, self.choices))}")
        return self.choices[self.choices.index(value)]  # 2 for 2.0

    def _text(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise self._complaint(value, f"must be text of at most {MAX_TEXT} characters")
        return value

    def _number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == math.inf:
            raise self._complaint(value, f"must be a number {self._range}")
        if not self.low <= value <= self.high:
            raise self._complaint(value, f"must be {self._range}")
        if self.is_whole:
            if value != int(value):
                raise self._complaint(value, f"must be a whole number; nearest: {round(value):,}")
            return int(value)
        return value

    @property
    def is_whole(self) -> bool:
        """Whether it counts something."""
        return float(self.step).is_integer()

    @property
    def _range(self) -> str:
        ends = f"from {self.low:,} to {self.high:,}"
        return f"{ends}, or {self.last}" if self.last else ends

    def _complaint(self, value: Any, requirement: str) -> BadQuestion:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        return BadQuestion(f"{self.name} = {shown} {requirement}", self.name)


def _series(low: float, high: float, digits: Sequence[float]) -> tuple[float, ...]:
    """Numbers with these leading digits from ``low`` to ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = (float(f"{digit}e{power}") for power in powers for digit in digits)
    return tuple(int(each) if each >= 1 and each.is_integer() else each for each in numbers if low <= each <= high)


def _halvings(low: int, high: int) -> tuple[float, ...]:
    """Powers of two from ``low`` to ``high`` and the middles between them."""
    powers = [2**power for power in range(low.bit_length() - 1, high.bit_length())]
    return tuple(sorted({*powers, *(power * 3 // 2 for power in powers if power > 1 and power * 3 // 2 < high)}))


@cache
def knobs() -> tuple[Knob, ...]:
    """All knobs, in the order of the page."""
    from windtunnel.sim.deployment.gpu import bundled_gpus
    from windtunnel.sim.deployment.model import bundled_models

    return (
        Knob("model", "deployment", "Model", "choice", "A bundled model.", choices=tuple(bundled_models())),
        Knob("gpu", "deployment", "GPU", "choice", "A card by its data sheet.", choices=tuple(bundled_gpus())),
        Knob(
            "tensor_parallel_size", "deployment", "GPUs per stage (TP)", "choice",
            "tensor_parallel_size: cards that each stage of a replica is spread over.", choices=(1, 2, 4, 8, 16),
        ),
        Knob(
            "pipeline_parallel_size", "deployment", "Stages (PP)", "choice",
            "pipeline_parallel_size: stages that the layers of a replica are spread over.",
            choices=(1, 2, 3, 4, 6, 8, 12, 16),
        ),
        Knob(
            "kv_cache_dtype", "deployment", "KV cache type", "choice",
            "kv_cache_dtype: fp8 halves the cache of a token.", choices=("auto", "fp8"),
        ),
        Knob(
            "data_parallel_size", "deployment", "Replicas", "stops",
            "data_parallel_size: copies of the model behind one router.", stops=(1, 2, 3, 4, 6, 8, 12, 16),
            high=MAX_REPLICAS,
        ),
        Knob(
            "gpu_memory_utilization", "deployment", "GPU memory utilization", "range",
            "gpu_memory_utilization: share of the card that vLLM may use.", low=0.1, high=1.0, step=0.01,
        ),
        Knob(
            "num_gpu_blocks_override", "deployment", "KV blocks, given", "number", "", low=2, high=50_000_000,
            hidden=True,
        ),
        Knob(
            "kv_cache_memory_bytes", "deployment", "KV bytes, given", "number", "", low=1, high=1 << 50, hidden=True
        ),
        Knob(
            "max_model_len", "engine", "Longest context", "stops",
            "max_model_len: prompt plus output of one request.", stops=_halvings(1024, 1 << 20), high=1 << 24,
            unit="tokens",
        ),
        Knob(
            "max_num_seqs", "engine", "Seats", "stops",
            "max_num_seqs: most requests that run at once.", stops=_halvings(1, 2048), high=1 << 16, unit="requests",
        ),
        Knob(
            "max_num_batched_tokens", "engine", "Token budget of a step", "stops",
            "max_num_batched_tokens: prompts are cut into chunks of at most so many.",
            stops=_halvings(256, 1 << 16), high=1 << 20, unit="tokens",
        ),
        Knob(
            "enable_prefix_caching", "engine", "Prefix caching", "switch",
            "enable_prefix_caching: reuse the KV blocks of prompts that begin alike.",
        ),
        Knob(
            "request_rate", "load", "Request rate", "stops", "Requests per second; ∞ is all at once.",
            stops=_series(0.1, 200, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)), low=0.001, high=10_000, step=0.001,
            unit="requests/s", last=ALL_AT_ONCE,
        ),
        Knob(
            "rate_scale", "load", "Trace, times as fast", "stops", "Replays the trace at so many times its rate.",
            stops=(0.1, 0.2, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), low=0.001,
            high=10_000, step=0.001, unit="×",
        ),
        Knob(
            "max_concurrency", "load", "Clients in a closed loop", "stops",
            "Most requests in flight; the others wait at the client.", stops=_halvings(1, 1024), high=1 << 16,
            last="none",
        ),
        Knob(
            "input", "load", "Prompt, mean", "stops", "Tokens; the distribution keeps its shape.",
            stops=_halvings(16, 1 << 17), high=1 << 20, unit="tokens",
        ),
        Knob(
            "output", "load", "Answer, mean", "stops", "Tokens; the distribution keeps its shape.",
            stops=_halvings(8, 1 << 14), high=1 << 18, unit="tokens",
        ),
        Knob(
            "num_requests", "load", "Requests simulated", "choice",
            "More take longer and make the high percentiles surer.", choices=(100, 200, 500, 1_000, 2_000, 5_000),
        ),
        Knob("seed", "load", "Seed", "number", "Another seed draws other requests.", low=0, high=1_000_000_000),
        Knob(
            "objectives", "goals", "Objectives", "text", "Such as ttft:p99<500ms itl:p99<50ms, set apart by blanks.",
        ),
        Knob(
            "gpu_hour", "goals", "Price of a GPU-hour", "number", "In any currency; nothing is assumed.", low=0,
            high=1_000_000, step=0.01,
        ),
    )  # fmt: skip


@cache
def knob(name: str) -> Knob:
    """The knob of that name; raises BadQuestion, naming the nearest, for another."""
    import difflib

    by_name = {each.name: each for each in knobs()}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(by_name)}"
    raise BadQuestion(f"settings has no {name[:60]!r}: {hint}", "settings")
