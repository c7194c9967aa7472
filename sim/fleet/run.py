"""One simulation of a fleet from start to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from windtunnel.sim.client import Client
from windtunnel.sim.engine.request import Request
from windtunnel.sim.fleet.disaggregation import DisaggregatedServer
from windtunnel.sim.fleet.faults import SlowedPrices
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.fleet.server import Answers, FleetServer, Instance, State
from windtunnel.sim.gateway import Gateway
from windtunnel.sim.log import RequestLog
from windtunnel.sim.records import Records, ReplicaRecords
from windtunnel.sim.simulated import SimExecutor, with_decode_times
from windtunnel.sim.tenancy import GatewayConfig
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import World


def run_fleet(
    workload: Workload,
    fleet: Fleet,
    horizon_ns: int | None,
    reporting: Callable[[Client], Callable[[Request, int], None]],
) -> Records:
    """What ``sim.simulate.serve`` does for a fleet.

    ``reporting(client)`` is what is to be called when a request is finished.  Raises OverflowError when time runs out.
    """
    world, requests = World(), RequestLog()
    client = Client(world, workload, fleet.pools[0].system.config.block_size, requests)
    answers = Answers(reporting(client), client.rejected, client.lost)
    gateway = None if fleet.gateway is None else _gateway(world, workload, fleet, fleet.gateway, client)
    if gateway is not None:
        answers = Answers(*map(gateway.then, answers))
    kind = DisaggregatedServer if fleet.has_roles else FleetServer
    server = kind(world, workload, fleet, gateway or client, answers, lambda: len(workload) - client.num_done)
    client.start(server if gateway is None else gateway.open(server))
    world.run(until=horizon_ns)
    num_left = client.write_unfinished()
    for instance in server.instances:
        for request in instance.scheduler.requests():
            instance.log.write_spans(request, instance.scheduler.token_spans(request))
    is_stuck = not server.is_expecting and any(_is_stuck(instance) for instance in server.instances)
    stalled = num_left > 0 and (horizon_ns is None or is_stuck)
    of_fleet, table = server.records(), requests.table()
    done = tuple(_measured(instance) for instance in server.instances)
    if num_left and horizon_ns is not None:
        end_ns = horizon_ns
    else:
        last_ends_ns = [int(records.steps.end_ns.max(initial=0)) for records in done]
        end_ns = max(int(table.finish_ns.max(initial=0)), *last_ends_ns)
    return Records(table, done, end_ns, stalled, fleet=of_fleet)


def _gateway(world: World, workload: Workload, fleet: Fleet, config: GatewayConfig, client: Client) -> Gateway:
    max_model_len = max(pool.system.config.max_model_len for pool in fleet.pools)
    return Gateway(world, workload, config, client, max_model_len, fleet.max_num_seats)


def _is_stuck(instance: Instance) -> bool:
    replica = instance.replica
    return instance.state is not State.GONE and (replica.is_stuck or replica.is_helpless)


def _measured(instance: Instance) -> ReplicaRecords:
    """What a replica did, each step with the part of its time that its decodes alone would have taken."""
    records, executor = instance.log.records(), instance.executor
    if instance.slowed and isinstance(executor, SimExecutor):
        executor = SlowedPrices(executor, instance.slowed, len(records.steps))
    return replace(records, steps=with_decode_times(records.steps, executor, instance.log.latency_ns()))
