"""The pool of one: calls are done in this process, when somebody waits for them."""

from __future__ import annotations

from windtunnel.workers.calls import Call, perform


class InProcess:
    """See ``Pool``."""

    def __init__(self) -> None:
        self._call: Call | None = None

    @property
    def has_room(self) -> bool:
        """One call at a time."""
        return self._call is None

    def submit(self, call: Call) -> None:
        """Nothing happens yet."""
        self._call = call

    def wait(self) -> None:
        """Do the call.  Ctrl-C stops it and is no outcome."""
        call, self._call = self._call, None
        if call is None or not call.is_wanted:
            return
        outcome = perform(*call.work)
        if isinstance(outcome.error, KeyboardInterrupt):
            raise outcome.error
        call.deliver(outcome._replace(traceback=""))  # the error has it still

    def poll(self) -> None:
        """Nothing is ever ready before it is waited for."""

    def close(self) -> None:
        """Forget the call."""
        self._call = None
