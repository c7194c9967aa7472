"""One simulation from start to end: a workload, an engine, a cost model; out come records."""

from __future__ import annotations

from collections.abc import Callable

from windtunnel.sim.client import Client
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.protocols import CostModel, Executor, SchedulerProtocol
from windtunnel.sim.engine.request import Request
from windtunnel.sim.log import ReplicaLog, RequestLog
from windtunnel.sim.records import Records
from windtunnel.sim.replica import Replica
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import World

Progress = Callable[[int, int], None]


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
    """Serve the workload to the end, or to ``horizon_ns``, and say what happened.

    ``executor`` defaults to the simulated one over ``cost``, and ``scheduler`` to the continuous batching that the
    config asks for; one that is given must be unused and made for the same KV pool.  ``progress(done, total)`` is
    called now and then with the number of requests that are finished.  The same arguments give the same records.

    Raises RequestTooLarge, before anything runs, for a request that needs more KV blocks than there are, and
    ValueError for a scheduler that is in use or has another pool.
    """
    check_fits(workload, config)
    if scheduler is None:
        scheduler = make_scheduler(config)
    else:
        _check_scheduler(scheduler, config)
    world = World()
    requests, log = RequestLog(), ReplicaLog(scheduler.config)
    client = Client(world, workload, config.block_size, requests)
    on_finish = client.answered if progress is None else _reporting(client, len(workload), progress)
    replica = Replica(world, 0, scheduler, executor or SimExecutor(cost), log, on_finish, client.rejected)
    client.start(replica.submit, replica.end_of_input)
    world.run(until=horizon_ns)
    num_open = client.write_unfinished(scheduler.num_emitted_tokens)
    for request in scheduler.requests():
        log.write_spans(request, scheduler.token_spans(request))
    stalled = num_open > 0 and (horizon_ns is None or replica.is_stuck or replica.is_helpless)
    table, steps = requests.table(), log.records()
    if num_open and horizon_ns is not None:
        end_ns = horizon_ns
    else:
        end_ns = max(int(table.finish_ns.max(initial=0)), int(steps.steps.end_ns.max(initial=0)))
    return Records(table, (steps,), end_ns, stalled)


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
