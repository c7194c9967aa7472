"""``Workers`` do jobs: in this process, in local processes or on a Ray cluster, with the same results in one order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from windtunnel.workers.calls import Call, Outcome, Pool, RemoteTraceback
from windtunnel.workers.errors import WorkerDied
from windtunnel.workers.in_process import InProcess
from windtunnel.workers.jobs import Done, Job
from windtunnel.workers.machine import usable_cpus
from windtunnel.workers.store import Store

Tell = Callable[[Done], None]

WINDOW = 1_000
"""How far ahead of the result that is handed out next others are done: what a slow job may pile up in memory."""


class Workers:
    """A pool of workers that lives over many rounds of work; a context manager, which ends them.

    ``jobs`` is how many calls run at once: None for as many as there are usable CPUs (or, with Ray, CPUs in the
    cluster), 1 for this very process.  ``ray`` is "auto" for the cluster that this machine is part of, an address
    (``HOST:PORT``, ``ray://HOST:PORT``), or "local:N" for one of N CPUs that starts and ends here.

    Raises ValueError for fewer jobs than 1, BadRayAddress (a ValueError) for another ``ray``, RayMissing without Ray,
    RayUnreachable if no cluster answers.
    """

    def __init__(self, jobs: int | None = None, *, ray: str | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {jobs}: how many processes share the work")
        self._alone = InProcess()
        self._pool: Pool | None = None
        if ray is not None:
            from windtunnel.workers.ray_cluster import RayCluster

            self._pool = cluster = RayCluster(ray, jobs)
            num = cluster.num_workers
        else:
            num = usable_cpus() if jobs is None else jobs
        self.num = num
        """How many calls run at once."""

    def map(self, jobs: Sequence[Job], *, store: Store | None = None, tell: Tell | None = None) -> Iterator[Any]:
        """The results of the jobs, in their order, as plain data, each as soon as those before it are there.

        A job whose result the store has is not done, and of equal jobs one; the store is given each result as soon as
        it is there, ``tell`` is then called in this process, in no certain order.  What a job raises is raised here
        when its turn comes, so that it is always the first in the order; jobs behind it are not begun any more.  A job
        whose process dies is done again.

        Nothing begins before the first result is asked for; work that is under way when the iterator is closed is
        dropped.  Raises WorkerDied if processes die again and again, StoreError if the store cannot keep a result.
        """
        return _Map(jobs, store, tell).results(self)

    def call(self, function: str, arguments: Iterable[Any]) -> Iterator[Any]:
        """What ``function`` (``package.module:name``) returns for each argument, in order; nothing is kept.

        Arguments and values are any objects that can be pickled.  Raises as ``map``.
        """
        outcomes = self._in_order([(function, argument) for argument in arguments], as_text=False)
        return (outcome.value for outcome in outcomes)

    def close(self) -> None:
        """End the processes, whatever they do."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _in_order(
        self,
        calls: Sequence[tuple[str, Any]],
        *,
        as_text: bool,
        finished: Callable[[int, Outcome], None] | None = None,
    ) -> Iterator[Outcome]:
        """Outcomes in the order of the calls; ``finished`` is told of each at once.  Raises what a call raised."""
        if not calls:
            return
        pool = self._pool_for(len(calls))
        batch = _Batch(finished)
        num_begun = 0
        try:
            for number in range(len(calls)):
                while True:
                    if pool not in (self._pool, self._alone):
                        raise WorkerDied("the workers were closed before all results were taken: take them before")
                    last = min(len(calls), number + WINDOW, batch.first_failed)
                    while num_begun < last and pool.has_room:
                        pool.submit(Call(batch, num_begun, *calls[num_begun], as_text))
                        num_begun += 1
                    if number in batch.outcomes:
                        break
                    pool.wait()
                outcome = batch.outcomes.pop(number)
                if outcome.error is not None:
                    raise _with_traceback(outcome)
                yield outcome
        finally:
            try:
                pool.poll()  # what is finished is kept
            finally:
                batch.is_open = False

    def _pool_for(self, num_calls: int) -> Pool:
        if self._pool is not None:
            return self._pool
        if self.num == 1 or num_calls == 1:
            return self._alone
        from windtunnel.workers.processes import LocalProcesses, in_worker

        if in_worker():
            return self._alone
        self._pool = LocalProcesses(self.num)
        return self._pool


def _with_traceback(outcome: Outcome) -> BaseException:
    assert outcome.error is not None, "asked for errors only"
    if outcome.traceback:
        outcome.error.__cause__ = RemoteTraceback(outcome.traceback)
    return outcome.error


class _Batch:
    """What came of the calls of one iteration and waits for its turn."""

    def __init__(self, finished: Callable[[int, Outcome], None] | None) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.first_failed = 2**62
        self.is_open = True
        self._finished = finished

    def deliver(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number] = outcome
        if outcome.error is not None:
            self.first_failed = min(self.first_failed, number)
        elif self._finished is not None:
            self._finished(number, outcome)


class _Map:
    """Jobs on their way to their results: which are known, which are equal, and which have to be done."""

    def __init__(self, jobs: Sequence[Job], store: Store | None, tell: Tell | None) -> None:
        self._jobs, self._store, self._tell = jobs, store, tell

    def results(self, workers: Workers) -> Iterator[Any]:
        jobs, store = self._jobs, self._store
        keys = [job.key for job in jobs]
        wanted = Counter(keys)
        known = {key for key in wanted if store is not None and key in store}
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            if key not in known:
                first.setdefault(key, index)
        to_do = list(first.values())
        texts: dict[str, str] = {}  # of what is wanted again

        def finished(number: int, outcome: Outcome) -> None:
            index = to_do[number]
            if store is not None:
                store.put(keys[index], outcome.value)
            self._say(index, outcome.value, was_cached=False, elapsed_s=outcome.elapsed_s)

        outcomes = workers._in_order(
            [(jobs[index].function, jobs[index].argument) for index in to_do], as_text=True, finished=finished
        )
        try:
            for index, key in enumerate(keys):
                if first.get(key) == index:
                    text = next(outcomes).value
                else:
                    text = store.text(key) if store is not None and key in known else texts[key]
                    self._say(index, text, was_cached=True, elapsed_s=0.0)
                wanted[key] -= 1
                if wanted[key] and key not in known:
                    texts[key] = text
                else:
                    texts.pop(key, None)
                yield json.loads(text)
        finally:
            outcomes.close()  # type: ignore[attr-defined]

    def _say(self, index: int, text: str, *, was_cached: bool, elapsed_s: float) -> None:
        if self._tell is not None:
            self._tell(Done(index, self._jobs[index], json.loads(text), was_cached, elapsed_s))
