"""The gateway that a scenario asks for, and how its tenants fare when each has the server to itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from windtunnel.scenarios.ledger import WINDTUNNEL_DEFAULT, Ledger
from windtunnel.scenarios.workloads.transform import take
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.metrics.tenants import ALONE_KEYS
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.tenancy import GatewayConfig, TenantPolicy
from windtunnel.sim.workload import Workload

MAX_TENANTS_ALONE = 10
MAX_REQUESTS_ALONE = 200_000
"""Of more tenants or requests nobody is simulated alone, because that takes as long as the run itself."""


def make_gateway(ledger: Ledger, config: SchedulerConfig, num_replicas: int) -> GatewayConfig | None:
    """The gateway of the scenario; None if neither [gateway] nor [tenants] asks for one."""
    given, tenants = ledger.loaded.scenario.gateway, ledger.loaded.scenario.tenants
    if given is None and not tenants:
        return None
    fairness = ledger.pick("gateway", "fairness", given.fairness if given else None, "weighted", WINDTUNNEL_DEFAULT)
    limit = given.max_in_flight if given else None
    num_seats = num_replicas * (config.max_num_active_seqs or config.max_num_seqs)
    is_counted = ledger.loaded.scenario.fleet is None  # the seats of a fleet are those of all its pools
    ledger.note("gateway", "max_in_flight", limit or (num_seats if is_counted else None), "seats of all replicas")
    policies: dict[str, TenantPolicy] = {}
    for name, tenant in tenants.items():
        told = tenant.model_dump(exclude_none=True)
        ledger.note("tenants", name, told)
        policies[name] = ledger.attempt("tenants", name, lambda told=told: TenantPolicy(**told))  # type: ignore[misc]
    return GatewayConfig(policies, fairness, limit)


def check_tenants(ledger: Ledger, system: System, workload: Workload) -> None:
    """Complain of settings for a tenant that has no request, and say how the gateway counts."""
    gateway = system.gateway
    if gateway is None:
        return
    ledger.attempt("tenants", tuple(gateway.tenants), lambda: gateway.check_names(workload))
    if workload.tenant is None:
        ledger.notes.append("The gateway has one queue: the workload has no tenants.")


def gateway_words(gateway: GatewayConfig, workload: Workload) -> dict[str, Any]:
    """The gateway as plain data: what a saved run holds, every tenant with its weight and limits."""
    names = workload.tenants
    return {
        "fairness": gateway.fairness,
        "max_in_flight": gateway.max_in_flight,
        "tenants": {name: asdict(gateway.tenants.get(name, TenantPolicy())) for name in names},
    }


def tenants_alone(
    workload: Workload, system: System | Fleet, horizon_ns: int | None
) -> dict[str, Mapping[str, float | None]] | None:
    """Latencies of each tenant's requests when no other tenant is there (keys as ``ALONE_KEYS``).

    None where that says nothing (fewer than two tenants have requests) or takes too long (see MAX_TENANTS_ALONE).
    """
    if workload.tenant is None or len(workload) > MAX_REQUESTS_ALONE:
        return None
    there = np.unique(workload.tenant).tolist()
    if not 2 <= len(there) <= MAX_TENANTS_ALONE:
        return None
    alone: dict[str, Mapping[str, float | None]] = {}
    for place in there:
        own = take(workload, np.flatnonzero(workload.tenant == place))
        alone[workload.tenants[place]] = _latencies(own, system, horizon_ns)
    return alone


def _latencies(own: Workload, system: System | Fleet, horizon_ns: int | None) -> dict[str, float | None]:
    from windtunnel.sim.metrics.latency import request_latencies
    from windtunnel.sim.metrics.sample import sample

    latencies = request_latencies(serve(own, system, horizon_ns=horizon_ns))
    ttft, e2el = sample(latencies.ttft_ns), sample(latencies.e2el_ns)
    values = (ttft.mean(), ttft.percentile(99), e2el.mean(), e2el.percentile(99))
    return {key: None if value is None else value / 1e6 for key, value in zip(ALONE_KEYS, values, strict=True)}
