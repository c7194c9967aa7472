"""Tenants of a drawn workload: whose requests come, how many, how long and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from windtunnel.scenarios.workloads.arrivals import Arrivals, Gamma, arrivals_from
from windtunnel.scenarios.workloads.errors import printable
from windtunnel.scenarios.workloads.lengths import Lengths, lengths_from
from windtunnel.scenarios.workloads.rows import conversation_roots, renumbered
from windtunnel.scenarios.workloads.specs import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE_OR_INFINITE,
    SECONDS_OR_NONE,
    TOKENS,
    Nested,
    Range,
    build_one,
    check_parameters,
    is_number,
)
from windtunnel.sim.workload import IntArray, Workload

PRIORITY = Range(least=-(2**31), most=2**31, whole=True)


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What one tenant asks for: a share of all requests, or requests at a rate of its own.

    What is left out is that of the workload.  Raises ValueError for a value out of range, and for a share together with
    a rate.
    """

    share: Annotated[
        float | None, NOT_NEGATIVE, "Its part of the requests (or conversations), relative to those of the others."
    ] = None
    request_rate: Annotated[
        float | None, POSITIVE_OR_INFINITE, "Requests (or conversations) per second of its own, in place of a share."
    ] = None
    burstiness: Annotated[
        float | None, POSITIVE_OR_INFINITE, "With request_rate: 1 is Poisson, below is burstier, inf is constant."
    ] = None
    arrival: Annotated[
        Arrivals | str | Mapping[str, Any] | None, Nested("arrivals"), "An arrival process of its own in full."
    ] = None
    start_s: Annotated[float, SECONDS_OR_NONE, "With arrivals of its own: when those begin, in seconds."] = 0.0
    num_requests: Annotated[
        int | None,
        COUNT,
        "With arrivals of its own: how many requests; without it those of all such tenants are shared by request_rate.",
    ] = None
    input: Annotated[
        Lengths | int | str | Mapping[str, Any] | None, Nested("lengths"), "Prompt tokens of its requests."
    ] = None
    output: Annotated[
        Lengths | int | str | Mapping[str, Any] | None, Nested("lengths"), "Output tokens of its requests."
    ] = None
    max_tokens: Annotated[int | None, TOKENS, "Output limit that its requests declare."] = None
    priority: Annotated[int | None, PRIORITY, "Priority of its requests in the engine; smaller is more urgent."] = None

    def __post_init__(self) -> None:
        check_parameters(self)
        for key in ("input", "output"):
            if getattr(self, key) is not None:
                lengths_from(getattr(self, key), key)
        if self.arrival is not None and self.request_rate is not None:
            raise ValueError("request_rate and arrival say the same thing twice: leave one out")
        if self.burstiness is not None and self.request_rate is None:
            raise ValueError("burstiness needs a request_rate")
        if self.share is not None and self.has_arrivals:
            raise ValueError("give a share of all requests or arrivals of its own, not both")
        if not self.has_arrivals and (self.num_requests is not None or self.start_s):
            raise ValueError("num_requests and start_s need arrivals of its own: give a request_rate or an arrival")
        if self.arrival is not None:
            arrivals_from(self.arrival, "arrival")
            if self.num_requests is None:
                raise ValueError("an arrival process of its own needs num_requests too")

    @property
    def has_arrivals(self) -> bool:
        """Whether its requests come by themselves, and not as a share of all."""
        return self.request_rate is not None or self.arrival is not None

    @property
    def is_plain(self) -> bool:
        """Whether nothing tells its requests from those of others."""
        own = (self.input, self.output, self.max_tokens, self.priority)
        return not self.has_arrivals and all(value is None for value in own)

    def arrivals(self) -> Arrivals:
        """Its own arrival process; ask only where it has one."""
        if self.arrival is not None:
            return arrivals_from(self.arrival, "arrival")
        assert self.request_rate is not None
        return Gamma(self.request_rate, 1.0 if self.burstiness is None else self.burstiness, rescale=True)


Tenants = Mapping[str, "TenantLoad | float | Mapping[str, Any]"]


def tenants_from(spec: Tenants, what: str = "tenants") -> dict[str, TenantLoad]:
    """Tenants from names with a share each (``{"acme": 0.7, "free": 0.3}``) or a table with the fields of TenantLoad.

    Raises ValueError that begins with ``what``, also where some have a share and others arrivals of their own.
    """
    if not spec:
        raise ValueError(f"{what}: name at least one tenant, such as {{acme = 0.7, free = 0.3}}")
    loads = {name: _load(value, f"{what}.{name}") for name, value in spec.items()}
    for name in loads:
        if not name.strip() or name != printable(name):
            raise ValueError(f"{what}: {name!r} is no name that can be printed")
    own = [name for name, load in loads.items() if load.has_arrivals]
    if own and len(own) < len(loads):
        other = next(name for name, load in loads.items() if not load.has_arrivals)
        raise ValueError(
            f"{what}: {own[0]} has arrivals of its own and {other} has none: give all tenants a share, or all a "
            "request_rate or arrival"
        )
    if not own and not sum(shares_of(loads)) > 0:
        raise ValueError(f"{what}: the shares must not all be 0")
    return loads


def _load(value: TenantLoad | float | Mapping[str, Any], what: str) -> TenantLoad:
    if isinstance(value, TenantLoad):
        return value
    if isinstance(value, Mapping):
        return build_one(value, TenantLoad, what)
    if not is_number(value):
        raise ValueError(f"{what}: must be a share such as 0.3 or a table, got {value!r}")
    return build_one({"share": value}, TenantLoad, what)


def shares_of(loads: Mapping[str, TenantLoad]) -> list[float]:
    """Relative parts of the requests; 1 for those who name none."""
    return [1.0 if load.share is None else load.share for load in loads.values()]


def num_requests_of(loads: Mapping[str, TenantLoad], num_requests: int | None) -> list[int]:
    """Requests of each tenant with arrivals of its own: its number, or its part by rate of ``num_requests``.

    Raises ValueError where that is not said, or where a rate is infinite among others.
    """
    given = [load.num_requests for load in loads.values()]
    rates = [load.request_rate or 0.0 for load, number in zip(loads.values(), given, strict=True) if number is None]
    if rates and num_requests is None:
        raise ValueError("tenants with a request_rate share num_requests: give it, or one to each tenant")
    if len(rates) > 1 and float("inf") in rates:
        raise ValueError("tenants cannot share num_requests by an infinite request_rate: give each its num_requests")
    parts = iter(_apportioned([1.0] if len(rates) == 1 else rates, num_requests or 0))
    return [next(parts) if number is None else number for number in given]


def _apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to the total (largest remainders)."""
    if not weights:
        return []
    exact = np.array(weights) * (total / sum(weights))
    whole = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    whole[np.argsort(-(exact - whole), kind="stable")[:short]] += 1
    return [int(number) for number in whole]


def merged(parts: Sequence[Workload], names: Sequence[str], source: str, notes: tuple[str, ...]) -> Workload:
    """One workload of several tenants' own, in order of time; at one instant in the order of the tenants.

    Nothing is shared across tenants.  Limits of the client (concurrency, time-out) are left to the caller.
    """
    sizes = [len(part) for part in parts]
    tenant = np.repeat(np.arange(len(parts)), sizes)
    first_row = np.cumsum([0, *sizes])
    previous = np.concatenate(
        [np.where(part.previous < 0, -1, part.previous + row) for part, row in zip(parts, first_row, strict=False)]
    )
    arrival_ns = _column(parts, "arrival_ns")
    order = np.argsort(arrival_ns[conversation_roots(previous)], kind="stable")
    columns: dict[str, Any] = {
        name: _column(parts, name)[order]
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority", "think_ns")
    }
    content, num_streams = _content(parts)
    return Workload(
        arrival_ns=arrival_ns[order],
        previous=renumbered(previous, order),
        content=None if content is None else tuple(content[row] for row in order.tolist()),
        num_streams=num_streams,
        tenant=tenant[order],
        tenants=tuple(names),
        source=source,
        notes=notes,
        **columns,
    )


def _column(parts: Sequence[Workload], name: str) -> IntArray:
    return np.concatenate([getattr(part, name) for part in parts])


def _content(parts: Sequence[Workload]) -> tuple[list[Any] | None, int]:
    if all(part.content is None for part in parts):
        return None, 0
    content: list[Any] = []
    first = 0
    for part in parts:
        rows = part.content or ((),) * len(part)
        content += [tuple((number + first, end) for number, end in row) for row in rows]
        first += part.num_streams
    return content, first


def labelled(load: Workload, loads: Mapping[str, TenantLoad], rng: np.random.Generator) -> Workload:
    """The workload with a tenant for each conversation, drawn by their shares."""
    bounds = np.cumsum(shares_of(loads)) / sum(shares_of(loads))
    roots = conversation_roots(load.previous)
    drawn = np.minimum(np.searchsorted(bounds, rng.random(len(load)), side="right"), len(loads) - 1)
    return replace(load, tenant=drawn[roots].astype(np.int64), tenants=tuple(loads))
