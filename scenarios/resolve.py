"""From a scenario to everything a simulation needs: each setting with its value and where that came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from windtunnel.scenarios.batching import make_batching, make_drafting
from windtunnel.scenarios.costs import ChosenCost, make_cost
from windtunnel.scenarios.economics import make_rates
from windtunnel.scenarios.engine import Hardware, make_engine
from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable
from windtunnel.scenarios.fleet import Kind, PoolPlan, fleet_words, is_fleet, make_fleet, pool_plans
from windtunnel.scenarios.gateway import check_tenants, gateway_words, make_gateway
from windtunnel.scenarios.ledger import WINDTUNNEL_DEFAULT, Entry, Ledger
from windtunnel.scenarios.load import Loaded
from windtunnel.scenarios.requests import check_lengths, make_workload
from windtunnel.scenarios.schema import Scenario
from windtunnel.scenarios.workloads.describe import describe
from windtunnel.sim.cost import statement
from windtunnel.sim.cost.evidence import evidence_of, weakest
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.deployment.engine_args import ENGINE
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu, siblings
from windtunnel.sim.deployment.memory import InfeasibleDeployment, KvPool
from windtunnel.sim.deployment.model import ModelFileUnreadable, ModelSpec, is_bundled, load_model
from windtunnel.sim.deployment.versions import VersionProfile, profile
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.engine.swap import SwapConfig
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.metrics.economics import Rates
from windtunnel.sim.metrics.slo import GoodputLimits, Slo, parse_slos
from windtunnel.sim.simulate import check_served
from windtunnel.sim.system import ROUTERS, System
from windtunnel.sim.workload import Workload

NS_PER_S = 1_000_000_000
DEFAULT_PERCENTILES = [90.0, 95.0, 99.0]
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # as vLLM's --dtype has them


@dataclass(frozen=True, slots=True)
class Resolved:
    """All that a simulation needs, and where it came from."""

    scenario: Scenario
    seed: int
    model: ModelSpec | None
    """None where nothing depends on it."""
    gpu: GpuSpec | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    version: VersionProfile
    """The release of vLLM whose defaults and rules apply."""
    kv_pool: KvPool | None
    """The memory plan; None where the number of blocks was given and no model and GPU with it."""
    system: System
    profile: str | None
    """What the cost model was read from: a bundled profile's name or a path; None if it was made from settings."""
    workload: Workload
    slo: tuple[Slo, ...]
    goodput: GoodputLimits | None
    percentiles: tuple[float, ...]
    horizon_ns: int | None
    measures_saturation: bool
    measures_tenants_alone: bool
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]
    """What may make the answer another one than was meant, in sentences for people."""
    notes: tuple[str, ...]
    """What was decided on the way, in sentences for people."""
    rates: Rates = field(default_factory=Rates)
    """What the GPUs of one replica cost and draw, as far as the scenario says it."""
    currency: str = ""
    fleet: Fleet | None = None
    """Where the replicas are servers of their own behind a router; model, GPU, memory plan and system are then those of
    its first pool."""

    @property
    def served(self) -> System | Fleet:
        """What serves the workload."""
        return self.system if self.fleet is None else self.fleet

    def check_is_one_server(self, purpose: str) -> None:
        """Raise ScenarioError where the scenario asks for a fleet, which the purpose has nothing to say of."""
        if self.fleet is not None:
            raise ScenarioError(
                f"{purpose} takes one server, and this scenario asks for a fleet (router "
                f"{self.fleet.routing.router}): leave out [fleet], or give another router (vllm or round_robin)"
            )

    @property
    def config(self) -> SchedulerConfig:
        """What the scheduler of each replica obeys."""
        return self.system.config

    @property
    def cost(self) -> CostModel:
        """What prices the steps."""
        return self.system.cost

    @property
    def evidence(self) -> str:
        """What stands behind the step times of all replicas; of several pools the weakest."""
        costs = [self.cost] if self.fleet is None else [pool.system.cost for pool in self.fleet.pools]
        return weakest(evidence_of(cost.describe()) for cost in costs)

    @property
    def engine_name(self) -> str:
        """Whose behaviour is simulated."""
        match self.system.batching:
            case StaticConfig() as static:
                return f"static batching, {static.batch_size} slots"
            case DynamicConfig() as dynamic:
                return f"dynamic batching as Triton's, max_batch_size {dynamic.max_batch_size}"
            case SwapConfig(preemption_mode="swap"):
                return f"{self.version.label}'s scheduler with swapping as in V0"
            case SwapConfig():
                return f"{self.version.label}'s scheduler, prefill first as in V0"
        return self.version.label

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas (that there are at the start)."""
        if self.fleet is not None:
            return sum(pool.rates.num_gpus * pool.system.num_replicas for pool in self.fleet.pools)
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.system.num_replicas

    def describe(self) -> dict[str, Any]:
        """All of it as plain data, in a fixed order: what a saved run and ``--dry-run --json`` hold."""
        gateway = self.system.gateway
        return {
            "scenario": {
                "name": self.scenario.name,
                "description": self.scenario.description,
                "teaches": self.scenario.teaches,
            },
            "seed": self.seed,
            "hardware": self._hardware(),
            "engine": self.engine_name,
            "workload": {key: value for key, value in describe(self.workload).items() if key != "notes"},
            "settings": [asdict(entry) for entry in self.entries],
            "memory": None if self.kv_pool is None else asdict(self.kv_pool),
            "cost": self.cost.describe(),
            **({} if gateway is None else {"gateway": gateway_words(gateway, self.workload)}),
            **({} if self.fleet is None else {"fleet": fleet_words(self.fleet)}),
            "objectives": {
                "slo": [objective.text for objective in self.slo],
                "goodput": None if self.goodput is None else str(self.goodput),
                "percentiles": list(self.percentiles),
            },
            "metadata": self._metadata(),
            "rates": {**asdict(self.rates), "currency": self.currency},
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def _hardware(self) -> dict[str, Any]:
        return {
            "model": self.model.name if self.model else None,
            "gpu": self.gpu.name if self.gpu else None,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "data_parallel_size": self.system.num_replicas if self.fleet is None else self.fleet.num_replicas,
            "num_gpus": self.num_gpus,
        }

    def _configured_arrivals(self) -> dict[str, Any]:
        """What the client was told, where it was; ``request_rate`` is otherwise what was measured."""
        told = {entry.key: entry.value for entry in self.entries if entry.section == "workload"}
        known = {key: told.get(key) for key in ("request_rate", "burstiness")}
        if not _is_number(known["request_rate"]):
            return {"burstiness": None}
        return known

    def _metadata(self) -> dict[str, Any]:
        """What the summary says of the run beside its results, under keys of ``vllm bench serve`` where it has one."""
        return {
            "model_id": self.model.name if self.model else None,
            **self._configured_arrivals(),
            "scenario": self.scenario.name,
            "seed": self.seed,
            "cost_model": self.cost.name,
            "cost_model_calibrated": self.cost.calibrated,
            "cost_model_profile": self.profile,
            **statement.summary_keys(self.cost.describe()),
            "cost_model_evidence": self.evidence,
            "step_time_noise": self.system.noise_seed is not None,
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def resolve(loaded: Loaded) -> Resolved:
    """Fill in every default, read or draw the workload, and check that it can run.

    Raises ScenarioError for settings that contradict each other or lack something; InfeasibleDeployment and
    RequestTooLarge for what vLLM would not start or never finish; TraceError, ProfileError and ScenarioUnreadable for
    files; UnsupportedModel.
    """
    plans, scenario = pool_plans(loaded), loaded.scenario
    ledger = Ledger(plans[0].loaded if plans else loaded)
    seed = ledger.pick("scenario", "seed", scenario.seed, 0, WINDTUNNEL_DEFAULT)
    hardware, pool, cost, system = _replicas(ledger, seed) if len(plans) < 2 else _of_pool(plans[0], ledger, seed)
    config = system.config
    fleet = None
    if plans:
        others = [_kind(plan, Ledger(plan.loaded), seed) for plan in plans[1:]]
        fleet = make_fleet(plans, [Kind(ledger, hardware, system), *others], seed)
    slo, goodput = _objectives(ledger)
    workload = make_workload(ledger, seed)
    check_tenants(ledger, system, workload)
    max_model_lens = (
        [config.max_model_len] if fleet is None else [each.system.config.max_model_len for each in fleet.pools]
    )
    check_lengths(ledger, workload, max(max_model_lens), hardware.model)
    check_served(workload, system if fleet is None else fleet)
    percentiles = ledger.pick("run", "percentiles", scenario.run.percentiles, DEFAULT_PERCENTILES, WINDTUNNEL_DEFAULT)
    horizon_ns = _horizon_ns(ledger)
    measures_saturation = _measures_saturation(ledger, workload)
    rates, currency = make_rates(ledger, hardware)
    return Resolved(
        scenario,
        seed,
        *hardware,
        pool,
        system,
        cost.profile,
        workload,
        slo,
        goodput,
        tuple(percentiles),
        horizon_ns,
        measures_saturation,
        ledger.pick("run", "tenants_alone", scenario.run.tenants_alone, True, WINDTUNNEL_DEFAULT)
        if workload.tenant is not None
        else False,
        ledger.entries,
        tuple(ledger.warnings),
        (*ledger.notes, *workload.notes),
        rates,
        currency,
        fleet,
    )


def _kind(plan: PoolPlan, ledger: Ledger, seed: int) -> Kind:
    found = _of_pool(plan, ledger, seed)
    return Kind(ledger, found[0], found[-1])


def _of_pool(plan: PoolPlan, ledger: Ledger, seed: int) -> tuple[Hardware, KvPool | None, ChosenCost, System]:
    """Replicas of one of several pools; what is wrong with them says in which."""
    try:
        return _replicas(ledger, seed)
    except InfeasibleDeployment as error:
        text = f"pool {plan.name}: {error}"
        raise InfeasibleDeployment(text, error.largest_max_model_len, error.smallest_tensor_parallel_size) from error
    except ScenarioError as error:
        raise ScenarioError(f"{error} (pool {plan.name})") from error


def _replicas(ledger: Ledger, seed: int) -> tuple[Hardware, KvPool | None, ChosenCost, System]:
    """Replicas of one kind: what runs on what, the memory plan, what their steps cost, and the engines."""
    hardware = read_hardware(ledger)
    config, pool = make_engine(ledger, hardware)
    _check_context(ledger, hardware.model, config.max_model_len)
    cost = make_cost(ledger, hardware, config)
    return hardware, pool, cost, _system(ledger, hardware, config, cost, seed)


def read_workload(loaded: Loaded) -> Workload:
    """The workload of a scenario alone, as ``resolve`` would read or draw it."""
    return make_workload(Ledger(loaded), loaded.scenario.seed or 0)


def read_hardware(ledger: Ledger) -> Hardware:
    """Model, GPUs and release of a scenario.  What is missing or wrong is reported by the ledger's ScenarioError."""
    given = ledger.loaded.scenario.deployment
    version = ledger.attempt("deployment", "engine_version", lambda: profile(given.engine_version or ENGINE))
    ledger.note("deployment", "engine_version", given.engine_version and version.name)
    model, gpu = _model(ledger), _gpu(ledger)
    _check_is_complete(ledger, model, gpu)
    size = ledger.pick("deployment", "tensor_parallel_size", given.tensor_parallel_size, 1, f"{version.label} default")
    num_stages = 1 if given.pipeline_parallel_size is None else given.pipeline_parallel_size
    ledger.note("deployment", "pipeline_parallel_size", given.pipeline_parallel_size)
    return Hardware(model, gpu, size, num_stages, version)


def _system(ledger: Ledger, hardware: Hardware, config: SchedulerConfig, chosen: ChosenCost, seed: int) -> System:
    """The engines with their policy, and what stands before them."""
    deployment, limits = ledger.loaded.scenario.deployment, ledger.loaded.scenario.engine
    batching, swap_cost = make_batching(ledger, hardware, config)
    cost = chosen.model
    drafting = make_drafting(ledger, hardware, cost, seed)
    if config.async_scheduling and isinstance(cost, RooflineCost):
        ledger.notes.append(
            "Asynchronous scheduling is on, as in vLLM: a request is seen one step later.  What that buys, host time "
            "hidden behind the GPU's work, is not taken off the uncalibrated step times, so it costs here and gains "
            "nothing (--no-async-scheduling turns it off)."
        )
    num_replicas = 1 if deployment.data_parallel_size is None else deployment.data_parallel_size
    ledger.note("deployment", "data_parallel_size", deployment.data_parallel_size)
    router = deployment.router or "vllm"
    if num_replicas > 1 and not is_fleet(ledger.loaded.scenario):
        ledger.note("deployment", "router", router, f"{hardware.engine_default} (internal load balancing)")
        _tell_of_lockstep(ledger, hardware)
    for key in ("max_num_queued_reqs", "max_num_queued_tokens"):
        ledger.note("engine", key, getattr(limits, key))
    gateway = make_gateway(ledger, config, num_replicas)
    system = System(
        config,
        cost,
        batching,
        swap_cost,
        drafting,
        num_replicas,
        router if router in ROUTERS else "vllm",
        limits.max_num_queued_reqs,
        limits.max_num_queued_tokens,
        seed if chosen.is_noisy else None,
        gateway=gateway,
    )
    _check_policy(ledger, system)
    return system


def _check_policy(ledger: Ledger, system: System) -> None:
    """Complain now, not in the middle of a run, of a config that the policy does not support."""
    try:
        system.make_scheduler()
    except ValueError as error:
        named = [key for key in ("async_scheduling", "enable_chunked_prefill", "max_model_len") if key in str(error)]
        section = "engine" if named and ledger.loaded.source_of("engine", named[0]) else "batching"
        raise ledger.blame(str(error), section, *(named if section == "engine" else ("policy",))) from error


def _tell_of_lockstep(ledger: Ledger, hardware: Hardware) -> None:
    if hardware.model is not None and hardware.model.num_moe_layers:
        ledger.warnings.append(
            f"{hardware.model.name} is a mixture of experts: vLLM's replicas of such models run their steps together, "
            "which is not modelled; here each goes at its own pace"
        )


def _model(ledger: Ledger) -> ModelSpec | None:
    given = ledger.loaded.scenario.deployment
    if given.model is None:
        return None
    path = ledger.loaded.path_of("deployment", "model", given.model)
    name = ledger.loaded.model_of("deployment", "model", given.model)
    if name == given.model and is_bundled(name) and path.exists():
        ledger.notes.append(
            f"Model {name} is the bundled one; {path}, which is called so too, is not read: write ./{name} for it."
        )
    try:
        model = ledger.attempt("deployment", "model", lambda: load_model(name))
    except OSError as error:
        raise ScenarioUnreadable(f"cannot read model {path}: {error.strerror or error}") from error
    except ScenarioError as error:
        is_unreadable = isinstance(error.__cause__, OSError | ModelFileUnreadable)
        raise (ScenarioUnreadable(str(error)) if is_unreadable else error) from error.__cause__
    if is_bundled(name) and name != model.name:
        ledger.notes.append(f"Model {name} is {model.name}.")
    dtype = _DTYPE_ALIASES.get(given.dtype or "auto", given.dtype or "auto")
    if dtype != "auto":
        model = ledger.attempt("deployment", "dtype", lambda: replace(model, dtype=dtype))
    ledger.note("deployment", "model", model.name)
    ledger.note("deployment", "dtype", model.dtype, "model config")
    return model


def _gpu(ledger: Ledger) -> GpuSpec | None:
    name = ledger.loaded.scenario.deployment.gpu
    if name is None:
        return None
    gpu = ledger.attempt("deployment", "gpu", lambda: load_gpu(name))
    ledger.note("deployment", "gpu", gpu.name)
    if name != gpu.name:
        others = ", ".join(siblings(name))
        ledger.notes.append(f"GPU {name} is taken as {gpu.name}{f' (there are also {others})' if others else ''}.")
    return gpu


def _check_is_complete(ledger: Ledger, model: ModelSpec | None, gpu: GpuSpec | None) -> None:
    scenario, reasons = ledger.loaded.scenario, []
    if scenario.deployment.num_gpu_blocks_override is None:
        reasons.append("the size of the KV cache follows from it (or give num_gpu_blocks_override)")
    if scenario.cost.kind in ("auto", "roofline"):
        reasons.append("so does the time of a step (or give another cost model, such as --cost constant:step_s=10ms)")
    for key, value in (("model", model), ("gpu", gpu)):
        if value is None and reasons:
            advice = f"give --{key} or {key} under [deployment] (windtunnel {key}s lists them)"
            raise ScenarioError(f"{ledger.loaded.origin}: no {key}: {advice}; {' and '.join(reasons)}")


def _objectives(ledger: Ledger) -> tuple[tuple[Slo, ...], GoodputLimits | None]:
    given = ledger.loaded.scenario.slo
    ledger.note("slo", "objectives", given.objectives or None)
    ledger.note("slo", "goodput", given.goodput or None)
    objectives = ledger.attempt("slo", "objectives", lambda: parse_slos(given.objectives))
    goodput = ledger.attempt("slo", "goodput", lambda: GoodputLimits.parse(given.goodput)) if given.goodput else None
    if goodput is None and any(objective.metric == "goodput" for objective in objectives):
        message = "an objective on goodput needs to know what is good: give goodput limits too, such as ttft:500"
        raise ledger.blame(message, "slo", "objectives")
    return objectives, goodput


def _check_context(ledger: Ledger, model: ModelSpec | None, max_model_len: int) -> None:
    if model is not None and max_model_len > model.max_model_len:
        ledger.warnings.append(
            f"max_model_len ({max_model_len:,}) is more than the longest context of {model.name} "
            f"({model.max_model_len:,}): vLLM only starts like this with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        )


def _horizon_ns(ledger: Ledger) -> int | None:
    horizon_s = ledger.loaded.scenario.run.horizon
    ledger.note("run", "horizon", horizon_s)
    return None if horizon_s is None else max(1, round(horizon_s * NS_PER_S))


def _measures_saturation(ledger: Ledger, workload: Workload) -> bool:
    """Where there is an offered rate to hold against it: not for closed loops and not for bursts."""
    is_open = workload.max_concurrency is None and bool((workload.arrival_ns > 0).any())
    source = f"{WINDTUNNEL_DEFAULT} where requests come at a rate of their own"
    asked = ledger.loaded.scenario.run.saturation
    if asked and not is_open:
        why = (
            f"at most {workload.max_concurrency:,} requests are in flight (max_concurrency), so the load adapts to the "
            "server"
            if workload.max_concurrency is not None
            else "all requests are due at once"
        )
        ledger.warnings.append(
            f"saturation was asked for but is not measured, and there is no utilisation (rho): {why} and there is no "
            "rate to hold against it; give a request_rate without max_concurrency"
        )
        return False
    return ledger.pick("run", "saturation", asked, is_open, source)
