"""The requests that gain exactly one token in every step, counted together instead of one by one."""

from __future__ import annotations

from windtunnel.sim.engine.request import Request

Calendar = dict[int, dict[Request, None]]


class DecodeSet:
    """Requests that share a clock: each step gives every member one token.

    Nothing is counted per member and step.  A member's computed tokens are ``clock + base``, so the sums that a step
    needs are kept in closed form, the members that need a block are those in one of ``block_size`` phases, and those
    that finish wait in a calendar.  A step costs the same for 2 members and for 1,000; a member is touched only when
    it joins, starts a block, or leaves.

    ``clock`` counts the engine's steps: it is the number of the step to be scheduled next.
    """

    __slots__ = (
        "_block_size",
        "_exits",
        "_finishes",
        "_newest",
        "_phases",
        "_sum_base",
        "_unsorted",
        "clock",
        "eager",
        "size",
    )

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self.size = 0
        self._block_size = block_size
        self._sum_base = 0
        self._phases: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._newest = [-1] * block_size  # highest admission number that a phase has seen
        self._unsorted: set[int] = set()  # phases in which somebody joined behind a later admission
        self._finishes: Calendar = {}
        self._exits: Calendar = {}
        self.eager: dict[Request, None] = {}
        """Members whose newest blocks others may look for."""

    def join(self, request: Request, finish_clock: int, exit_clock: int, eager: bool) -> None:
        """Take in a request that gets one token in each of the next steps.

        Its last token comes with the step before ``finish_clock``; it is scheduled for no step from ``exit_clock`` on,
        unless that is -1 (it will have finished by then).
        ``eager`` members have blocks that others may look for, so these must be findable at once (``filling``).
        """
        request.decoding = True
        request.base -= self.clock
        self.size += 1
        self._sum_base += request.base
        phase = -request.base % self._block_size
        self._phases[phase][request] = None
        if request.order < self._newest[phase]:
            self._unsorted.add(phase)
        else:
            self._newest[phase] = request.order
        request.finish_clock = finish_clock
        self._finishes.setdefault(finish_clock, {})[request] = None
        request.exit_clock = exit_clock
        if exit_clock >= 0:
            self._exits.setdefault(exit_clock, {})[request] = None
        if eager:
            self.eager[request] = None

    def leave(self, request: Request) -> None:
        """Let a member go; its computed tokens are its own again."""
        self.size -= 1
        self._sum_base -= request.base
        del self._phases[-request.base % self._block_size][request]
        _strike(self._finishes, request.finish_clock, request)
        if request.exit_clock >= 0:
            _strike(self._exits, request.exit_clock, request)
        if self.eager:
            self.eager.pop(request, None)
        request.decoding = False
        request.base += self.clock

    def finish_at(self, request: Request, finish_clock: int) -> None:
        """A member's last token turns out to come with the step before ``finish_clock``."""
        _strike(self._finishes, request.finish_clock, request)
        request.finish_clock = finish_clock
        self._finishes.setdefault(finish_clock, {})[request] = None

    def context_tokens(self) -> int:
        """Cached tokens that the next step reads: every member's computed ones and its new one."""
        return self.size * (self.clock + 1) + self._sum_base

    def num_crossing(self) -> int:
        """How many members need a new block in the next step."""
        return len(self._phases[self.clock % self._block_size])

    def crossing(self) -> list[Request]:
        """Those members, in the order of their admission."""
        return self._in_order(self.clock % self._block_size)

    def filling(self, step: int) -> list[Request]:
        """The eager members whose newest block is full after step number ``step``, in the order of their admission."""
        members = self._in_order((step + 1) % self._block_size)
        return [request for request in members if request in self.eager]

    def has_due(self, clock: int) -> bool:
        """Whether any member's last token comes with the step before ``clock``."""
        return clock in self._finishes

    def due(self, clock: int) -> list[Request]:
        """The members whose last token came with the step before ``clock``; they are still members."""
        return list(self._finishes[clock]) if clock in self._finishes else []

    @property
    def has_exhausted(self) -> bool:
        """Whether any member is not scheduled for the next step or any later one."""
        return self.clock in self._exits

    def exhausted(self) -> list[Request]:
        """Those members; they are still members."""
        return list(self._exits.get(self.clock, ()))

    def _in_order(self, phase: int) -> list[Request]:
        members = self._phases[phase]
        if phase in self._unsorted:
            self._unsorted.discard(phase)
            ordered = sorted(members, key=_by_order)
            self._phases[phase] = dict.fromkeys(ordered)
            return ordered
        return list(members)


def _strike(calendar: Calendar, clock: int, request: Request) -> None:
    entries = calendar[clock]
    del entries[request]
    if not entries:
        del calendar[clock]


def _by_order(request: Request) -> int:
    return request.order
