"""A gateway before the server: whose request goes in next, and how much each tenant may ask for.

Requests queue here, one queue a tenant, and go on to the server while it has room for them.  Among tenants of one
priority the next is the one that has got the least for its weight: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM
1996) with a request's tokens as its size, whose tag is also the counter of the "virtual token counter" of Sheng et al.
(OSDI 2024).  Whoever was idle begins where the others are, so nobody saves up service; a tenant that is alone gets
everything.

A request is charged its prompt and its ``max_tokens`` when it goes in, for no gateway knows how long the answer will
be, and what it did not use is given back when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from windtunnel.sim.client import Server
from windtunnel.sim.engine.request import Request
from windtunnel.sim.tenancy import GatewayConfig, TenantPolicy
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import REPLY_NS, World

NOT_PLACED = -1
"""The replica of a request that is still here."""
SECONDS_PER_MINUTE = 60
_ATOMS = 10**18
"""Parts of a request or token that a bucket counts in, so that what flows in within a nanosecond is a whole number."""


class TooManyRequests(ValueError):
    """A tenant is beyond its limits (the gateway answers with HTTP 429)."""


class Sender(Protocol):
    """Who sent the requests, as the gateway sees it."""

    def placed(self, request: Request, replica: int) -> None:
        """A request that was taken in before has come to this replica."""

    def rejected(self, request: Request, now_ns: int) -> None:
        """A request that was taken in before was refused after all."""


class TokenBucket:
    """Lets ``per_s`` things through per second on average and ``capacity`` at once.

    More than ``capacity`` at once goes through a full bucket, which then owes the rest.  Counts in whole numbers, so
    the same calls give the same answers on every machine.
    """

    def __init__(self, per_s: float, capacity: float) -> None:
        self._atoms_per_ns = max(1, round(per_s * (_ATOMS // 10**9)))
        self._capacity = round(capacity * _ATOMS)
        self._level = self._capacity
        self._at_ns = 0

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Nanoseconds until so much may go through; 0 is now."""
        self._fill(now_ns)
        missing = min(amount * _ATOMS, self._capacity) - self._level
        return max(0, -(-missing // self._atoms_per_ns))

    def take(self, amount: int, now_ns: int) -> None:
        """Let it through."""
        self._fill(now_ns)
        self._level -= amount * _ATOMS

    def give_back(self, amount: int) -> None:
        """Some of what was taken was not needed."""
        self._level = min(self._level + amount * _ATOMS, self._capacity)

    def _fill(self, now_ns: int) -> None:
        self._level = min(self._level + (now_ns - self._at_ns) * self._atoms_per_ns, self._capacity)
        self._at_ns = now_ns


class _Tenant:
    """One tenant's queue, its limits and what it has got."""

    def __init__(self, name: str, place: int, policy: TenantPolicy) -> None:
        self.name = name
        self.place = place
        self.policy = policy
        self.queue: deque[tuple[int, Request]] = deque()  # (number of the submission, request)
        self.num_in_flight = 0
        self.tag = 0.0
        """Tokens charged so far over weight, lifted to the others' whenever it had nothing that could go."""
        rate, minute = policy.requests_per_s, policy.tokens_per_minute
        self._requests = None if rate is None else TokenBucket(rate, max(1.0, rate))
        self._tokens = None if minute is None else TokenBucket(minute / SECONDS_PER_MINUTE, minute)

    def wait_ns(self, request: Request, now_ns: int) -> int:
        """Nanoseconds until its rates let the request through."""
        waits = [0]
        if self._requests is not None:
            waits.append(self._requests.wait_ns(1, now_ns))
        if self._tokens is not None:
            waits.append(self._tokens.wait_ns(charged_tokens(request), now_ns))
        return max(waits)

    def take(self, request: Request, now_ns: int) -> None:
        """Count the request against its rates."""
        if self._requests is not None:
            self._requests.take(1, now_ns)
        if self._tokens is not None:
            self._tokens.take(charged_tokens(request), now_ns)

    def settle(self, num_unused_tokens: int) -> None:
        """A request ended and did not use that much of what it was charged."""
        self.tag -= num_unused_tokens / self.policy.weight
        if self._tokens is not None:
            self._tokens.give_back(num_unused_tokens)

    @property
    def has_seat(self) -> bool:
        """Whether one more of its requests may be in the server."""
        most = self.policy.max_in_flight
        return most is None or self.num_in_flight < most


def charged_tokens(request: Request) -> int:
    """What a request counts when it goes in: its prompt and the longest answer that it may get."""
    return request.num_prompt_tokens + request.may_emit


class Gateway:
    """Stands between a client and a server, for both of which it looks like the other."""

    def __init__(
        self,
        world: World,
        workload: Workload,
        config: GatewayConfig,
        sender: Sender,
        max_model_len: int,
        num_seats: int,
    ) -> None:
        """``num_seats`` is how many requests the server can run at once.

        Raises ValueError for settings of a tenant that the workload does not have.
        """
        config.check_names(workload)
        self._world = world
        self._sender = sender
        self._max_model_len = max_model_len
        self._limit = num_seats if config.max_in_flight is None else config.max_in_flight
        self._is_fair = config.fairness == "weighted"
        names = workload.tenants or ("",)
        self._tenants = [_Tenant(name, i, config.tenants.get(name, TenantPolicy())) for i, name in enumerate(names)]
        self._tenant_of = None if workload.tenant is None else workload.tenant
        self._clock: dict[int, float] = {}  # virtual time of each priority: the latest tag that went in
        self._waiting: dict[_Tenant, None] = {}  # tenants with a queue
        self._replica: dict[Request, int] = {}
        self._num_submitted = 0
        self._submitting: Request | None = None
        self._refusal: ValueError | None = None
        self._alarm_ns = -1
        self._has_ended = False
        self._server: Server | None = None

    def open(self, server: Server) -> Gateway:
        """Let requests through to this server; returns itself."""
        self._server = server
        return self

    # -- as a client sees it

    def submit(self, request: Request) -> int:
        """Take a request in; returns its replica, or NOT_PLACED while it waits here.

        Raises ValueError if the engine refuses it, TooManyRequests beyond the limits of a tenant that does not queue.
        """
        request.limit(self._max_model_len)
        tenant, now_ns = self._whose(request), self._world.now_ns
        if tenant.policy.beyond == "reject":
            self._check(tenant, request, now_ns)
            tenant.take(request, now_ns)
        if not tenant.queue:
            self._lift(tenant)
            self._waiting[tenant] = None
        tenant.queue.append((self._num_submitted, request))
        self._num_submitted += 1
        self._submitting, self._refusal = request, None
        self._let_in()
        self._submitting = None
        if self._refusal is not None:
            raise self._refusal
        return self._replica.get(request, NOT_PLACED)

    def abort(self, request: Request, replica: int) -> int:  # noqa: ARG002 - it knows better where the request is
        """Drop a request; returns the tokens that it had got."""
        if request not in self._replica:
            self._withdraw(request)
            return 0
        num_emitted = self._now_at.abort(request, self._replica[request])
        self.left(request)
        return num_emitted

    def num_emitted_tokens(self, request: Request, replica: int) -> int:  # noqa: ARG002
        """Output tokens that a request has got."""
        if request not in self._replica:
            return 0
        return self._now_at.num_emitted_tokens(request, self._replica[request])

    def end_of_input(self) -> None:
        """No more requests will be submitted; the server hears of it when the last one here has gone in."""
        self._has_ended = True
        self._tell_of_the_end()

    # -- as a server sees it

    def placed(self, request: Request, replica: int) -> None:
        """The server moved a request to another replica."""
        self._replica[request] = replica
        self._sender.placed(request, replica)

    def then(self, tell: Callable[[Request, int], None]) -> Callable[[Request, int], None]:
        """What to call when the server is done with a request: counts it, and passes it on to ``tell``."""

        def done(request: Request, now_ns: int) -> None:
            if request in self._replica:
                self.left(request)
            tell(request, now_ns)

        return done

    def left(self, request: Request) -> None:
        """A request is no longer in the server: settle what it cost, and see who can go in for it."""
        tenant = self._whose(request)
        del self._replica[request]
        tenant.num_in_flight -= 1
        tenant.settle(charged_tokens(request) - request.num_prompt_tokens - request.num_emitted)
        self._world.call_in(REPLY_NS, self._let_in)

    # -- who goes in next

    def _let_in(self, _: object = None) -> None:
        """Let requests in, one after the other, while the server has room and somebody may."""
        while len(self._replica) < self._limit:
            tenant = self._next()
            if tenant is None:
                break
            self._send(tenant)
        if not self._replica and not self._waiting:
            self._end_busy_period()
        self._tell_of_the_end()

    def _next(self) -> _Tenant | None:
        """The tenant whose turn it is; None if nobody may go now, and then a time is set to look again."""
        now_ns, best, soonest_ns = self._world.now_ns, None, -1
        for tenant in self._waiting:
            wait_ns = self._wait_ns(tenant, now_ns)
            if wait_ns:
                self._lift(tenant)
                if wait_ns > 0 and (soonest_ns < 0 or wait_ns < soonest_ns):
                    soonest_ns = wait_ns
            elif best is None or self._rank(tenant) < self._rank(best):
                best = tenant
        if best is None and soonest_ns > 0:
            self._look_again(now_ns + soonest_ns)
        return best

    def _wait_ns(self, tenant: _Tenant, now_ns: int) -> int:
        """Nanoseconds until the head of the queue may go: 0 is now, -1 until another of its requests ends."""
        if not tenant.has_seat:
            return -1
        if tenant.policy.beyond == "reject":
            return 0  # it was counted when it came
        return tenant.wait_ns(tenant.queue[0][1], now_ns)

    def _rank(self, tenant: _Tenant) -> tuple[int, float, int]:
        first = tenant.tag if self._is_fair else float(tenant.queue[0][0])
        return tenant.policy.priority, first, tenant.place

    def _send(self, tenant: _Tenant) -> None:
        _, request = tenant.queue.popleft()
        if not tenant.queue:
            del self._waiting[tenant]
        try:
            replica = self._now_at.submit(request)
        except ValueError as error:
            self._refuse(request, error)
            return
        self._charge(tenant, request)
        self._replica[request] = replica
        if request is not self._submitting:
            self._sender.placed(request, replica)

    def _charge(self, tenant: _Tenant, request: Request) -> None:
        if tenant.policy.beyond == "queue":
            tenant.take(request, self._world.now_ns)
        tenant.num_in_flight += 1
        level = tenant.policy.priority
        self._clock[level] = max(self._clock.get(level, 0.0), tenant.tag)
        tenant.tag += charged_tokens(request) / tenant.policy.weight

    def _refuse(self, request: Request, error: ValueError) -> None:
        if request is self._submitting:
            self._refusal = error
        else:
            self._sender.rejected(request, self._world.now_ns)

    def _lift(self, tenant: _Tenant) -> None:
        """Whoever could not go begins where the others are."""
        tenant.tag = max(tenant.tag, self._clock.get(tenant.policy.priority, 0.0))

    def _end_busy_period(self) -> None:
        """Nothing is left, so nobody owes anybody anything."""
        for tenant in self._tenants:
            level = tenant.policy.priority
            self._clock[level] = max(self._clock.get(level, 0.0), tenant.tag)

    def _check(self, tenant: _Tenant, request: Request, now_ns: int) -> None:
        most, num_open = tenant.policy.max_in_flight, tenant.num_in_flight + len(tenant.queue)
        if most is not None and num_open >= most:
            raise TooManyRequests(
                f"request {request.request_id}: {tenant.name} has {num_open} requests in flight, its max_in_flight is "
                f"{most}"
            )
        wait_ns = tenant.wait_ns(request, now_ns)
        if wait_ns:
            raise TooManyRequests(
                f"request {request.request_id}: {tenant.name} is beyond its rate limits for another "
                f"{wait_ns / 1e9:.3f} s"
            )

    def _look_again(self, then_ns: int) -> None:
        now_ns = self._world.now_ns
        if self._alarm_ns <= now_ns or then_ns < self._alarm_ns:
            self._alarm_ns = then_ns
            self._world.call_in(then_ns - now_ns, self._let_in)

    def _withdraw(self, request: Request) -> None:
        tenant = self._whose(request)
        kept = deque(entry for entry in tenant.queue if entry[1] is not request)
        tenant.queue = kept
        if not kept:
            self._waiting.pop(tenant, None)
        self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        if self._has_ended and not self._waiting:
            self._has_ended = False
            self._now_at.end_of_input()

    def _whose(self, request: Request) -> _Tenant:
        if self._tenant_of is None:
            return self._tenants[0]
        return self._tenants[int(self._tenant_of[int(request.request_id)])]

    @property
    def _now_at(self) -> Server:
        assert self._server is not None, "open the gateway before requests come"
        return self._server
