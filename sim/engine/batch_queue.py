"""Who goes into the next batch, and when: the rules of Triton's dynamic batcher, of which static batching is a case.

Written after the public documentation of the Triton Inference Server ("Batchers", "Model Configuration") and its
``model_config.proto``, for requests of batch size 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from windtunnel.sim.engine.request import Request

TIMEOUT_ACTIONS = ("REJECT", "DELAY")
NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and in what number requests may wait; names and zeros as in Triton's ``ModelQueuePolicy``.

    Raises ValueError for a negative number or an unknown action.
    """

    max_queue_size: int = 0
    """Waiting requests beyond which one that comes is rejected; 0 is no limit."""
    default_timeout_microseconds: int = 0
    """Wait after which ``timeout_action`` befalls a request; 0 is never."""
    timeout_action: str = "REJECT"
    """REJECT it, or DELAY it: it then goes behind all others of its level that have not waited that long."""

    def __post_init__(self) -> None:
        for name in ("max_queue_size", "default_timeout_microseconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.timeout_action not in TIMEOUT_ACTIONS:
            raise ValueError(f"timeout_action must be one of {', '.join(TIMEOUT_ACTIONS)}, got {self.timeout_action!r}")


class _Level:
    """The waiting requests of one priority level: those in time, in order, then those that were delayed."""

    __slots__ = ("delayed", "fresh", "policy", "timeout_ns")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.timeout_ns = policy.default_timeout_microseconds * NS_PER_US
        self.fresh: deque[Request] = deque()
        self.delayed: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self.fresh) + len(self.delayed)

    def pop_expired(self, now_ns: int) -> Iterator[Request]:
        """Those that have waited longer than the time-out; all have the same, so they are the first."""
        while self.timeout_ns and self.fresh and now_ns > self.fresh[0].arrival_ns + self.timeout_ns:
            yield self.fresh.popleft()


class BatchQueue:
    """Waiting requests, and the rule that makes batches of them.

    Asked while an instance of the model is idle, it gives the largest preferred batch that can be made; if none can,
    it waits for company until a request of the batch has waited ``max_delay_ns``, or the batch cannot grow, and gives
    what there is.  Without a delay it gives what there is at once; with ``max_delay_ns`` None it waits for ever, unless
    the input has ended.
    """

    def __init__(
        self,
        max_batch_size: int,
        preferred_batch_sizes: Collection[int] = (),
        max_delay_ns: int | None = 0,
        policy: QueuePolicy | None = None,
        num_levels: int = 0,
        default_level: int = 0,
        level_policies: Mapping[int, QueuePolicy] | None = None,
    ) -> None:
        """Levels are numbered 1 … ``num_levels``, 1 going first; 0 levels are one queue for all."""
        self.max_batch_size = max_batch_size
        self._preferred = sorted(preferred_batch_sizes or (max_batch_size,))
        self._max_delay_ns = max_delay_ns
        self._default_level = default_level
        self._has_ended = False
        special, policy = level_policies or {}, policy or QueuePolicy()
        numbers = range(1, num_levels + 1) if num_levels else range(1)
        self._levels = {number: _Level(special.get(number, policy)) for number in numbers}

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError if its level is full."""
        level = self._level_of(request)
        if 0 < level.policy.max_queue_size <= len(level):
            raise ValueError(
                f"request {request.request_id}: the queue is full, {len(level)} requests wait: raise max_queue_size "
                f"({level.policy.max_queue_size}) or send fewer requests"
            )
        level.fresh.append(request)

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        level = self._level_of(request)
        (level.fresh if request in level.fresh else level.delayed).remove(request)

    def end_of_input(self) -> None:
        """Nobody will come any more, so nobody is waited for without a limit."""
        self._has_ended = True

    def expire(self, now_ns: int) -> list[Request]:
        """Let time-outs take effect; returns the requests that are rejected by them."""
        rejected: list[Request] = []
        for level in self._levels.values():
            for request in level.pop_expired(now_ns):
                (level.delayed if level.policy.timeout_action == "DELAY" else rejected).append(request)
        return rejected

    def take(self, now_ns: int, num_fitting: Callable[[Sequence[Request]], int]) -> list[Request]:
        """Take out the next batch, or nothing if it has to wait.

        ``num_fitting`` says how many of the given requests, from the first on, fit into memory as one batch.
        """
        candidates = list(islice(self, self.max_batch_size))
        fitting = candidates[: num_fitting(candidates)] if candidates else candidates
        if not fitting:
            return []
        is_closed = len(fitting) < len(candidates) or len(fitting) == self.max_batch_size
        batch = fitting[: self._dispatch_size(fitting, is_closed, now_ns)]
        for request in batch:
            level = self._level_of(request)
            (level.fresh or level.delayed).popleft()
        return batch

    def next_decision_ns(self, now_ns: int) -> int | None:
        """The next time after ``now_ns`` at which waiting alone changes something; None for never."""
        times = [
            level.fresh[0].arrival_ns + level.timeout_ns + 1
            for level in self._levels.values()
            if level.timeout_ns and level.fresh
        ]
        if self._max_delay_ns is not None and len(self):
            times.append(_oldest_ns(islice(self, self.max_batch_size)) + self._max_delay_ns)
        return min((time for time in times if time > now_ns), default=None)

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        for level in self._levels.values():
            yield from level.fresh
            yield from level.delayed

    def _dispatch_size(self, fitting: Sequence[Request], is_closed: bool, now_ns: int) -> int:
        """How many of these go now; ``is_closed`` says that no more can join them."""
        num, delay_ns = len(fitting), self._max_delay_ns
        best = max((size for size in self._preferred if size <= num), default=0)
        if delay_ns == 0:
            return best or num
        is_over = self._has_ended if delay_ns is None else now_ns - _oldest_ns(fitting) >= delay_ns
        if best and not is_over:
            return best
        return num if is_over or is_closed else 0

    def _level_of(self, request: Request) -> _Level:
        return self._levels.get(request.priority, self._levels[self._default_level])


def _oldest_ns(requests: Sequence[Request] | Iterator[Request]) -> int:
    return min(request.arrival_ns for request in requests)
