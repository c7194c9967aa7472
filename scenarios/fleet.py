"""The fleet that a scenario asks for: its pools, each with what is different there, its router, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from windtunnel.scenarios import schema
from windtunnel.scenarios.economics import make_rates
from windtunnel.scenarios.engine import Hardware
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.ledger import WINDTUNNEL_DEFAULT, Ledger
from windtunnel.scenarios.load import Loaded
from windtunnel.scenarios.locate import KeyPath
from windtunnel.sim.cost.evidence import evidence_of
from windtunnel.sim.fleet.autoscaler import Autoscaler
from windtunnel.sim.fleet.faults import Crash, Fault, Slowdown
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.health import HealthChecks
from windtunnel.sim.fleet.routers import Routing
from windtunnel.sim.fleet.transfer import KvTransfer
from windtunnel.sim.system import ROUTERS, System

NS_PER_S = 1_000_000_000
ONLY_POOL = "all"
"""Name of the pool of a fleet that names none."""
PROBE_DEFAULT = "Kubernetes' readiness probes"
_FLEET_ROUTER = "least_requests"
"""Of pools, where no router is given."""
_DURATIONS = (
    *("start_up", "interval", "metric_delay", "up_stabilization", "down_stabilization", "up_period", "drain_timeout"),
)
_ROUTING_KEYS = (
    *("max_requests_per_replica", "max_waiting_requests"),
    *("prefix_weight", "queue_weight", "kv_weight"),
    *("prefix_block_tokens", "prefix_max_blocks", "prefix_capacity_blocks"),
)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool as the scenario asks for it."""

    name: str
    spec: schema.FleetPool
    loaded: Loaded
    """The scenario as it is for this pool's replicas."""


class Kind(NamedTuple):
    """Replicas of one pool, resolved."""

    ledger: Ledger
    hardware: Hardware
    system: System


def is_fleet(scenario: schema.Scenario) -> bool:
    """Whether the replicas are servers of their own behind a router, and not one server with data parallelism."""
    router = scenario.deployment.router
    return scenario.fleet is not None or (router is not None and router not in ROUTERS)


def pool_plans(loaded: Loaded) -> tuple[PoolPlan, ...]:
    """The pools of the scenario's fleet; of one that names none, a single one.  Empty where it asks for no fleet.

    Raises ScenarioError for what is said twice.
    """
    scenario = loaded.scenario
    if not is_fleet(scenario):
        return ()
    fleet = scenario.fleet or schema.Fleet()
    if not fleet.pools:
        return (PoolPlan(ONLY_POOL, schema.FleetPool(autoscaler=fleet.autoscaler), loaded),)
    ledger = Ledger(loaded)
    if fleet.autoscaler is not None:
        raise ledger.blame("each of the pools has an autoscaler of its own: move it into a pool", "fleet", "autoscaler")
    if scenario.deployment.data_parallel_size is not None:
        message = "data_parallel_size has no meaning beside [fleet.pools]: give replicas of each pool"
        raise ledger.blame(message, "deployment", "data_parallel_size")
    return tuple(PoolPlan(name, spec, _of_pool(loaded, name, spec)) for name, spec in fleet.pools.items())


def _of_pool(loaded: Loaded, name: str, spec: schema.FleetPool) -> Loaded:
    """The scenario with what is different in this pool."""
    scenario, sources, overridden = loaded.scenario, dict(loaded.sources), set(loaded.overridden)
    changed: dict[str, Any] = {}
    for section in ("deployment", "engine"):
        own = getattr(spec, section).model_dump(exclude_none=True)
        for key in ("data_parallel_size", "router"):
            if key in own:
                where = sources.get(("fleet", "pools", name, section, key), loaded.origin)
                remedy = "give replicas of the pool" if key == "data_parallel_size" else "it belongs in [deployment]"
                raise ScenarioError(f"{where}: {key} cannot differ between pools: {remedy}")
        for key in own:
            _move(sources, ("fleet", "pools", name, section, key), (section, key))
            overridden.discard((section, key))
        changed[section] = getattr(scenario, section).model_copy(update=own)
    changed["deployment"] = changed["deployment"].model_copy(update={"data_parallel_size": spec.replicas or 1})
    _move(sources, ("fleet", "pools", name, "replicas"), ("deployment", "data_parallel_size"))
    if spec.cost is not None:
        changed["cost"] = spec.cost
        for path in [("cost",), *(("cost", key) for key in type(spec.cost).model_fields)]:
            _move(sources, ("fleet", "pools", name, *path), path)
            overridden.discard(path)
    own_scenario = scenario.model_copy(update=changed)
    return replace(loaded, scenario=own_scenario, sources=sources, overridden=frozenset(overridden))


def _move(sources: dict[KeyPath, str], old: KeyPath, new: KeyPath) -> None:
    sources.pop(new, None)
    if old in sources:
        sources[new] = sources[old]


def make_fleet(plans: Sequence[PoolPlan], kinds: Sequence[Kind], seed: int) -> Fleet:
    """The fleet, written down in the first kind's ledger, which is the scenario's.

    Raises ScenarioError for settings that contradict each other.
    """
    ledger = kinds[0].ledger
    spec = plans[0].loaded.scenario.fleet or schema.Fleet()
    _note_pools(ledger, plans, kinds)
    pools = tuple(_pool(ledger, plan, kind) for plan, kind in zip(plans, kinds, strict=True))
    routing = _routing(ledger, spec, seed)
    faults = tuple(_fault(ledger, spec, index, pools) for index in range(len(spec.faults)))
    ledger.note("fleet", "faults", [fault_words(fault) for fault in faults] or None)
    gateway = kinds[0].system.gateway
    if ledger.loaded.scenario.engine.max_num_queued_reqs is not None:
        ledger.notes.append("max_num_queued_reqs is that of each replica: in a fleet each is a server of its own.")
    given: dict[str, Any] = {}
    if faults or any(pool.autoscaler is not None for pool in pools):
        given["on_crash"] = ledger.pick("fleet", "on_crash", spec.on_crash, "retry", WINDTUNNEL_DEFAULT)
        given["max_attempts"] = ledger.pick("fleet", "max_attempts", spec.max_attempts, 3, WINDTUNNEL_DEFAULT)
    keys = ("faults", "on_crash", "max_attempts", "pools", "kv_transfer_bandwidth", "kv_transfer_latency")
    transfer = _transfer(ledger, spec)
    given["health"] = _health(ledger, spec, faults)
    if spec.network_latency is not None:
        given["network_ns"] = _ns(spec.network_latency)
        ledger.note("fleet", "network_latency", spec.network_latency)
    return ledger.attempt(
        "fleet", keys, lambda: Fleet(pools, routing, faults, gateway=gateway, transfer=transfer, **given)
    )


def _health(ledger: Ledger, spec: schema.Fleet, faults: Sequence[Fault]) -> HealthChecks:
    """How the router learns of crashes; written down where there are some."""
    default = HealthChecks()
    has_crashes = any(isinstance(fault, Crash) for fault in faults)
    values: dict[str, Any] = {}
    for key, otherwise, source in (
        ("health_check_interval", default.interval_ns / NS_PER_S, PROBE_DEFAULT),
        ("health_check_failures", default.num_failures, PROBE_DEFAULT),
        ("dead_replicas", default.dead_replicas, WINDTUNNEL_DEFAULT),
    ):
        stated = getattr(spec, key)
        is_told = stated is not None or has_crashes
        values[key] = ledger.pick("fleet", key, stated, otherwise, source) if is_told else otherwise
    return HealthChecks(_ns(values["health_check_interval"]), values["health_check_failures"], values["dead_replicas"])


def _transfer(ledger: Ledger, spec: schema.Fleet) -> KvTransfer | None:
    """How a cache gets from prefill to decode replicas; None where no pool has such a role."""
    if all(pool.role in (None, "mixed") for pool in spec.pools.values()):
        for key in ("kv_transfer_bandwidth", "kv_transfer_latency", "kv_bytes_per_token"):
            if getattr(spec, key) is not None:
                raise ledger.blame(
                    f"{key} is for pools with the roles prefill and decode, and none has one", "fleet", key
                )
        return None
    if spec.kv_transfer_bandwidth is None:
        raise ledger.blame(
            "pools have prefill and decode roles, so the way between them has to be known: give kv_transfer_bandwidth "
            "(bytes per second of one GPU's link, such as 50GB for a network card of 400 Gbit/s)",
            "fleet",
            "pools",
        )
    latency_s = ledger.pick("fleet", "kv_transfer_latency", spec.kv_transfer_latency, 0.0, WINDTUNNEL_DEFAULT)
    ledger.note("fleet", "kv_transfer_bandwidth", spec.kv_transfer_bandwidth)
    return KvTransfer(float(spec.kv_transfer_bandwidth), _ns(latency_s))


def _kv_bytes_per_token(plan: PoolPlan, hardware: Hardware, ledger: Ledger) -> int | None:
    """KV cache of a token on one GPU of this pool."""
    spec = plan.loaded.scenario.fleet
    if spec is not None and spec.kv_bytes_per_token is not None:
        return spec.kv_bytes_per_token
    if hardware.model is None:
        raise ledger.blame(
            "prefill and decode pools copy KV caches: give a model, or kv_bytes_per_token, so that their size is known",
            "fleet",
            "pools",
        )
    dtype = plan.loaded.scenario.deployment.kv_cache_dtype or "auto"
    return hardware.model.kv_bytes_per_token(hardware.tensor_parallel_size, dtype)


def _note_pools(ledger: Ledger, plans: Sequence[PoolPlan], kinds: Sequence[Kind]) -> None:
    """What the other pools' replicas are, where that is not what the first one's are."""
    first = {(entry.section, entry.key): entry.value for entry in ledger.entries}
    if len(plans) > 1:
        ledger.note("fleet", "pools", {plan.name: kind.system.num_replicas for plan, kind in _pairs(plans, kinds)})
    for plan, kind in _pairs(plans, kinds)[1:]:
        for entry in kind.ledger.entries:
            if first.get((entry.section, entry.key), object()) != entry.value:
                ledger.note("fleet", f"{plan.name}.{entry.key}", entry.value, entry.source)
        for mine, theirs in ((ledger.warnings, kind.ledger.warnings), (ledger.notes, kind.ledger.notes)):
            mine += [f"Pool {plan.name}: {text}" for text in theirs if text not in mine]


def _pairs(plans: Sequence[PoolPlan], kinds: Sequence[Kind]) -> list[tuple[PoolPlan, Kind]]:
    return list(zip(plans, kinds, strict=True))


def _pool(ledger: Ledger, plan: PoolPlan, kind: Kind) -> Pool:
    scaler = None if plan.spec.autoscaler is None else _autoscaler(ledger, plan)
    rates, _ = make_rates(Ledger(plan.loaded), kind.hardware)
    weight = plan.spec.weight or 1.0
    if plan.spec.weight is not None:
        ledger.note("fleet", f"{plan.name}.weight", weight)
    gpu = kind.hardware.gpu.name if kind.hardware.gpu else ""
    system = replace(kind.system, gateway=None)
    role = plan.spec.role or "mixed"
    num_bytes = None if role == "mixed" else _kv_bytes_per_token(plan, kind.hardware, ledger)
    if role != "mixed":
        ledger.note("fleet", f"{plan.name}.role", role)
        ledger.note("fleet", f"{plan.name}.kv_bytes_per_token", num_bytes, "model config")
    return ledger.attempt(
        "fleet",
        ("autoscaler", "pools"),
        lambda: Pool(plan.name, system, scaler, weight, gpu, rates, role, num_bytes),
    )


def _autoscaler(ledger: Ledger, plan: PoolPlan) -> Autoscaler:
    spec = plan.spec.autoscaler
    assert spec is not None, "the caller looks"
    given: dict[str, Any] = spec.model_dump(exclude_none=True)
    given |= {f"{key}_ns": _ns(given.pop(key)) for key in _DURATIONS if key in given}
    scaler = ledger.attempt("fleet", ("autoscaler", "pools"), lambda: Autoscaler(**given))
    prefix = "" if plan.name == ONLY_POOL else f"{plan.name}."
    told = {"metric": scaler.metric, "target": scaler.target}
    told |= {key: getattr(scaler, key) for key in ("min_replicas", "max_replicas", "tolerance")}
    told |= {key: _seconds(getattr(scaler, f"{key}_ns")) for key in _DURATIONS}
    ledger.note("fleet", f"{prefix}autoscaler", {key: value for key, value in told.items() if value is not None})
    return scaler


def _routing(ledger: Ledger, spec: schema.Fleet, seed: int) -> Routing:
    router = ledger.loaded.scenario.deployment.router or (_FLEET_ROUTER if spec.pools else "vllm")
    if not any(entry.key == "router" for entry in ledger.entries):
        ledger.note("deployment", "router", router)
    values: dict[str, Any] = {key: getattr(spec, key) for key in _ROUTING_KEYS if getattr(spec, key) is not None}
    for key in ("stats_interval", "stats_delay"):
        if getattr(spec, key) is not None:
            values[f"{key}_ns"] = _ns(getattr(spec, key))
            ledger.note("fleet", key, getattr(spec, key))
    for key in _ROUTING_KEYS:
        ledger.note("fleet", key, getattr(spec, key))
    made = ledger.attempt("fleet", tuple(values), lambda: Routing(router, seed=seed, **values))
    if made.reads_stats and "stats_interval_ns" not in values:
        ledger.note("fleet", "stats_interval", made.stats_interval_ns / NS_PER_S, "llm-d's endpoint picker")
    return made


def _fault(ledger: Ledger, spec: schema.Fleet, index: int, pools: Sequence[Pool]) -> Fault:
    given = spec.faults[index]
    name = given.pool or (pools[0].name if len(pools) == 1 else "")
    if not name:
        raise ledger.blame(
            f"fault {index} names no pool: give one of {', '.join(p.name for p in pools)}", "fleet", "faults"
        )
    place, at_ns = given.replica or 0, _ns(given.at)
    for key, kind in (("restart_after", "crash"), ("factor", "slow"), ("duration", "slow")):
        if getattr(given, key) is not None and given.kind != kind:
            raise ledger.blame(
                f"fault {index}: {key} is for faults of kind {kind}, this is {given.kind}", "fleet", "faults"
            )
    if given.kind == "crash":
        after_ns = None if given.restart_after is None else max(1, _ns(given.restart_after))
        return Crash(name, place, at_ns, after_ns)
    if given.factor is None:
        raise ledger.blame(f"fault {index} is slow, but not by how much: give a factor such as 2", "fleet", "faults")
    end_ns = None if given.duration is None else at_ns + max(1, _ns(given.duration))
    return Slowdown(name, place, at_ns, end_ns, given.factor)


def fault_words(fault: Fault) -> str:
    """A fault in a few words, as the flag has it."""
    where = f"pool={fault.pool},replica={fault.place}"
    if isinstance(fault, Crash):
        again = "" if fault.restart_after_ns is None else f",restart_after={_seconds(fault.restart_after_ns):g}s"
        return f"crash:{where},at={_seconds(fault.at_ns):g}s{again}"
    lasts = "" if fault.end_ns is None else f",duration={_seconds(fault.end_ns - fault.start_ns):g}s"
    return f"slow:{where},at={_seconds(fault.start_ns):g}s,factor={fault.factor:g}{lasts}"


def fleet_words(fleet: Fleet) -> dict[str, Any]:
    """The fleet as plain data: what a saved run holds."""
    return {
        "router": fleet.routing.router,
        "on_crash": fleet.on_crash,
        "max_attempts": fleet.max_attempts,
        "faults": [fault_words(fault) for fault in fleet.faults],
        "health_checks": asdict(fleet.health),
        "network_latency_ns": fleet.network_ns,
        "pools": {pool.name: _pool_words(pool) for pool in fleet.pools},
        **({} if fleet.transfer is None else {"transfer": asdict(fleet.transfer)}),
    }


def _pool_words(pool: Pool) -> Mapping[str, Any]:
    scaler = pool.autoscaler
    return {
        "replicas": pool.system.num_replicas,
        **({} if pool.role == "mixed" else {"role": pool.role, "kv_bytes_per_token": pool.kv_bytes_per_token}),
        "min_replicas": None if scaler is None else scaler.min_replicas,
        "max_replicas": None if scaler is None else scaler.max_replicas,
        "gpu": pool.gpu or None,
        "gpus_per_replica": pool.rates.num_gpus,
        "weight": pool.weight,
        "max_num_seqs": pool.system.config.max_num_seqs,
        "num_gpu_blocks": pool.system.config.num_gpu_blocks,
        "cost_model": pool.system.cost.name,
        "cost_model_calibrated": pool.system.cost.calibrated,
        "cost_model_evidence": evidence_of(pool.system.cost.describe()),
    }


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_S
