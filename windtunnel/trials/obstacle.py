"""Why a run is not possible, where that is a result and no mistake of whoever asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded
    from windtunnel.scenarios.resolve import Resolved


class Obstacle(NamedTuple):
    """Why a run is not possible."""

    reason: str
    is_contradiction: bool
    """Whether vLLM refuses the settings, or every request; otherwise the model or a request does not fit the memory."""

    @property
    def verdict(self) -> str:
        """``infeasible`` or ``not possible``."""
        return "not possible" if self.is_contradiction else "infeasible"


def resolved_or_obstacle(loaded: Loaded) -> Resolved | Obstacle:
    """The run with every setting known, or why it is not possible, where that is a result.

    Raises as ``resolve`` for everything else.
    """
    from windtunnel.scenarios.errors import NothingToServe, ScenarioError
    from windtunnel.scenarios.resolve import resolve
    from windtunnel.sim.deployment.memory import InfeasibleDeployment
    from windtunnel.sim.simulate import RequestTooLarge

    try:
        return resolve(loaded)
    except (InfeasibleDeployment, RequestTooLarge) as error:
        return Obstacle(str(error), is_contradiction=False)
    except NothingToServe as error:
        return Obstacle(str(error), is_contradiction=True)
    except ScenarioError as error:
        if not _is_refused_by_engine(loaded):
            raise
        return Obstacle(str(error), is_contradiction=True)


def _is_refused_by_engine(loaded: Loaded) -> bool:
    """Whether the engine's settings contradict model and GPU, or each other; not if these are not known at all."""
    from windtunnel.scenarios.engine import make_engine
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.ledger import Ledger
    from windtunnel.scenarios.resolve import read_hardware

    ledger = Ledger(loaded)
    hardware = read_hardware(ledger)
    try:
        make_engine(ledger, hardware)
    except ScenarioError:
        return True
    return False
