"""A server in a thread of this process, and the questions that tests put to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from windtunnel.executor.server.build import ServedModel, ServerSettings, make_frontend
from windtunnel.executor.server.executors import Executors
from windtunnel.executor.server.frontend import Frontend
from windtunnel.executor.server.run import GRACE_S, address_of, listen, make_server
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import Executor


class Served(NamedTuple):
    url: str
    client: httpx.Client
    frontend: Frontend
    server: Any = None
    """uvicorn's."""

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The first choice of an answer that must succeed."""
        answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def is_idle(self) -> bool:
        engine = self.frontend.loop.engine
        pool, usable = engine.scheduler.pool, engine.scheduler.config.num_usable_blocks
        return not engine.sequences and not self.frontend.loop.num_jobs and pool.num_free == usable


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fails if it does not become true soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.002)


def limits(**values: Any) -> SchedulerConfig:
    roomy = {"num_gpu_blocks": 400, "block_size": 4, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    return SchedulerConfig(**{**roomy, "max_model_len": 600, **values})


@contextmanager
def serving(
    scheduler: SchedulerConfig | None = None,
    *,
    step_s: float = 1e-4,
    config: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    executors: Mapping[str, Executor] | None = None,
    executor: str = "sim",
    grace_s: float = GRACE_S,
    **settings: Any,
) -> Iterator[Served]:
    """A running server; ``executors`` take the place of those that the settings make."""
    model = ServedModel(("tiny", "alias"), "tiny", config, folder)
    settings = {"cost": ConstantCost(step_s), "executor": executor, **settings}
    frontend = make_frontend(model, ServerSettings(scheduler or limits(), **settings))
    if executors is not None:
        makers = {kind: (lambda made=made: made) for kind, made in executors.items()}
        frontend.executors = Executors({"sim": lambda: frontend.loop.engine.executor, **makers}, {})
    listener = listen("127.0.0.1", 0)
    server = make_server(frontend, "0.0.test", grace_s=grace_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=address_of(listener), timeout=30.0) as client:
            assert client.get("/health").status_code in (200, 503)
            yield Served(address_of(listener), client, frontend, server)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()
        assert not thread.is_alive()
