"""One simulation from start to end: a workload, an engine, a cost model; out come records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from windtunnel.sim.client import Client
from windtunnel.sim.cluster import Cluster
from windtunnel.sim.engine.batches import BatchScheduler
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.protocols import CostModel, Executor, SchedulerProtocol
from windtunnel.sim.engine.request import Request
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.fleet.run import run_fleet
from windtunnel.sim.gateway import Gateway
from windtunnel.sim.log import ReplicaLog, RequestLog
from windtunnel.sim.records import Records, ReplicaRecords
from windtunnel.sim.replica import Replica
from windtunnel.sim.simulated import SimExecutor, with_decode_times
from windtunnel.sim.system import System
from windtunnel.sim.tenancy import GatewayConfig
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import World

Progress = Callable[[int, int], None]


class TimeRunsOut(ValueError):
    """Simulated time would pass what 64 bits of nanoseconds hold."""


class RequestTooLarge(ValueError):
    """A request that the KV pool can never hold, so that the engine would try for ever."""


def run(
    workload: Workload,
    config: SchedulerConfig,
    cost: CostModel,
    *,
    horizon_ns: int | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
    scheduler: SchedulerProtocol | None = None,
) -> Records:
    """Serve the workload on one engine with continuous batching; see ``serve``.

    ``executor`` defaults to the simulated one over ``cost``, and ``scheduler`` to the continuous batching that the
    config asks for; one that is given must be unused and made for the same KV pool.

    Raises RequestTooLarge as ``serve``, and ValueError for a scheduler that is in use or has another pool.
    """
    check_fits(workload, config)
    if scheduler is None:
        scheduler = make_scheduler(config)
    else:
        _check_scheduler(scheduler, config)
    engine = _Engine(scheduler, executor or SimExecutor(cost))
    return _run(workload, (engine,), _PLAIN, horizon_ns, progress)


def serve(
    workload: Workload, system: System | Fleet, *, horizon_ns: int | None = None, progress: Progress | None = None
) -> Records:
    """Serve the workload to the end, or to ``horizon_ns``, and say what happened.

    ``progress(done, total)`` is called now and then with the number of requests that are finished.  The same arguments
    give the same records.

    Raises RequestTooLarge, before anything runs, for a request that needs more KV blocks than there are (in any pool of
    a fleet), and ValueError for a config that the policy does not support.
    """
    if isinstance(system, Fleet):
        return _serve_fleet(workload, system, horizon_ns, progress)
    check_fits(workload, system.config)
    engines = [_Engine(system.make_scheduler(), system.make_executor(number)) for number in range(system.num_replicas)]
    front = _Front(system.router, system.max_num_queued_reqs, system.max_num_queued_tokens, system.gateway)
    return _run(workload, engines, front, horizon_ns, progress)


def _serve_fleet(workload: Workload, fleet: Fleet, horizon_ns: int | None, progress: Progress | None) -> Records:
    check_served(workload, fleet)

    def on_finish(client: Client) -> Callable[[Request, int], None]:
        return client.answered if progress is None else _reporting(client, len(workload), progress)

    try:
        return run_fleet(workload, fleet, horizon_ns, on_finish)
    except OverflowError as error:
        raise TimeRunsOut(_TOO_LONG) from error


class _Engine(NamedTuple):
    scheduler: SchedulerProtocol
    executor: Executor


class _Front(NamedTuple):
    """What stands before the engines: what ``Cluster`` takes, and before that a gateway."""

    router: str
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    gateway: GatewayConfig | None = None


_PLAIN = _Front("vllm", None, None)
_TOO_LONG = "simulated time passes 292 years: make steps or waits shorter, or end the run with a horizon"


def _run(
    workload: Workload,
    engines: Sequence[_Engine],
    front: _Front,
    horizon_ns: int | None,
    progress: Progress | None,
) -> Records:
    world, requests = World(), RequestLog()
    client = Client(world, workload, engines[0].scheduler.config.block_size, requests)
    on_finish = client.answered if progress is None else _reporting(client, len(workload), progress)
    on_reject: Callable[[Request, int], None] = client.rejected
    gateway = None if front.gateway is None else _gateway(world, workload, engines, front.gateway, client)
    if gateway is not None:
        on_finish, on_reject = gateway.then(on_finish), gateway.then(on_reject)
    logs = [ReplicaLog(engine.scheduler.config, isinstance(engine.scheduler, BatchScheduler)) for engine in engines]
    replicas = [
        Replica(world, number, engine.scheduler, engine.executor, log, on_finish, on_reject)
        for number, (engine, log) in enumerate(zip(engines, logs, strict=True))
    ]
    cluster = Cluster(world, replicas, *front[:3])
    client.start(cluster if gateway is None else gateway.open(cluster))
    try:
        world.run(until=horizon_ns)
    except OverflowError as error:
        raise TimeRunsOut(_TOO_LONG) from error
    num_open = client.write_unfinished()
    for replica, log in zip(replicas, logs, strict=True):
        for request in replica.scheduler.requests():
            log.write_spans(request, replica.scheduler.token_spans(request))
    is_stuck = any(replica.is_stuck or replica.is_helpless for replica in replicas)
    stalled = num_open > 0 and (horizon_ns is None or is_stuck)
    table = requests.table()
    done = tuple(_measured(log, engine.executor) for log, engine in zip(logs, engines, strict=True))
    if num_open and horizon_ns is not None:
        end_ns = horizon_ns
    else:
        last_ends_ns = [int(records.steps.end_ns.max(initial=0)) for records in done]
        end_ns = max(int(table.finish_ns.max(initial=0)), *last_ends_ns)
    return Records(table, done, end_ns, stalled)


def _gateway(
    world: World, workload: Workload, engines: Sequence[_Engine], config: GatewayConfig, client: Client
) -> Gateway:
    configs = [engine.scheduler.config for engine in engines]
    num_seats = sum(each.max_num_active_seqs or each.max_num_seqs for each in configs)
    return Gateway(world, workload, config, client, max(each.max_model_len for each in configs), num_seats)


def _measured(log: ReplicaLog, executor: Executor) -> ReplicaRecords:
    """What a replica did, each step with the part of its time that its decodes alone would have taken."""
    records = log.records()
    return replace(records, steps=with_decode_times(records.steps, executor, log.latency_ns()))


def check_served(workload: Workload, system: System | Fleet) -> None:
    """Raise RequestTooLarge for the first request that some replica it may come to can never hold; see ``check_fits``.

    Prefill replicas only hold prompts.
    """
    if not isinstance(system, Fleet):
        check_fits(workload, system.config)
        return
    prompts = replace(workload, num_output_tokens=np.ones_like(workload.num_output_tokens))
    for pool in system.pools:
        check_fits(prompts if pool.role == "prefill" else workload, pool.system.config)


def check_fits(workload: Workload, config: SchedulerConfig) -> None:
    """Raise RequestTooLarge for the first request whose tokens never fit the KV pool all at once.

    The last output token is never written to the cache, so prompt + output - 1 tokens have to fit; prompts that
    max_model_len refuses do not count.
    """
    longest = (workload.num_prompt_tokens + workload.num_output_tokens).clip(max=config.max_model_len) - 1
    too_large = (longest > config.num_kv_tokens) & (workload.num_prompt_tokens < config.max_model_len)
    if too_large.any():
        row = int(too_large.argmax())
        needed = -(-int(longest[row]) // config.block_size)
        raise RequestTooLarge(
            f"request {row} needs {needed:,} KV blocks ({int(longest[row]):,} tokens) but the cache has "
            f"{config.num_usable_blocks:,}: lower max_model_len or the request's length, or make the pool larger"
        )


def _check_scheduler(scheduler: SchedulerProtocol, config: SchedulerConfig) -> None:
    if scheduler.num_requests:
        raise ValueError(f"the scheduler already has {scheduler.num_requests} requests: give a new one to each run")
    for name in ("num_gpu_blocks", "block_size", "max_model_len"):
        of_scheduler, given = getattr(scheduler.config, name), getattr(config, name)
        if of_scheduler != given:
            raise ValueError(
                f"the scheduler was made for {name} {of_scheduler}, the config says {given}: make both from one config"
            )


def _reporting(client: Client, total: int, progress: Progress) -> Callable[[Request, int], None]:
    every = max(1, total // 200)

    def on_finish(request: Request, end_ns: int) -> None:
        client.answered(request, end_ns)
        if client.num_done % every == 0 or client.num_done == total:
            progress(client.num_done, total)

    return on_finish
