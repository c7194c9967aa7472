"""What serves the requests of a simulation: engines, what their steps cost, and who gets which request."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig, DynamicScheduler
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.protocols import CostModel, Executor, SchedulerProtocol
from windtunnel.sim.engine.static import StaticConfig, StaticScheduler
from windtunnel.sim.engine.swap import SwapConfig, SwapScheduler
from windtunnel.sim.noise import StepNoise
from windtunnel.sim.simulated import NoisySimExecutor, SimExecutor
from windtunnel.sim.speculation import Drafting
from windtunnel.sim.tenancy import GatewayConfig

ROUTERS = ("vllm", "round_robin")

Batching = StaticConfig | DynamicConfig | SwapConfig
"""Settings of another policy than continuous batching."""


@dataclass(frozen=True, slots=True)
class System:
    """One deployment: ``num_replicas`` equal engines behind a router.

    Raises ValueError, naming the field, for a value out of range, for speculation without a ``drafting`` of as many
    tokens, for swapping without a ``swap_cost``, and for noise without a fitted cost model.
    """

    config: SchedulerConfig
    cost: CostModel
    batching: Batching | None = None
    """None is continuous batching."""
    swap_cost: SwapCost | None = None
    """Needed where ``batching`` swaps."""
    drafting: Drafting | None = None
    """Needed where the config speculates."""
    num_replicas: int = 1
    router: str = "vllm"
    """``vllm`` looks at the load as vLLM's own load balancer does; ``round_robin`` takes turns."""
    max_num_queued_reqs: int | None = None
    """Requests in the system, waiting and running, beyond which one more is rejected; None is no limit.

    Source of both limits: ``AsyncLLM.check_admission`` of vLLM 0.32.
    """
    max_num_queued_tokens: int | None = None
    """Prompt tokens of requests without a first token from which on a new one is rejected; None is no limit."""
    noise_seed: int | None = None
    """Steps scatter by the ``sigma`` of the fitted ``cost`` (``StepNoise``); None is the prediction itself."""
    gateway: GatewayConfig | None = None
    """What queues requests before the server, one queue a tenant; None lets all of them in as they come."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if self.noise_seed is not None and not isinstance(self.cost, FittedCost):
            raise ValueError(f"the cost model {self.cost.name} states no noise: give a fitted one, or no noise_seed")
        self._check_drafting()
        is_swapping = isinstance(self.batching, SwapConfig) and self.batching.preemption_mode == "swap"
        if is_swapping and self.swap_cost is None:
            raise ValueError("batching swaps KV blocks, but what that costs was not said: give a swap_cost")

    def _check_drafting(self) -> None:
        num_tokens = self.config.num_speculative_tokens
        if num_tokens and self.drafting is None:
            raise ValueError("num_speculative_tokens is above 0, but how drafts fare was not said: give a drafting")
        if self.drafting is not None and self.drafting.num_speculative_tokens != num_tokens:
            raise ValueError(
                f"the drafting proposes {self.drafting.num_speculative_tokens} tokens, num_speculative_tokens is "
                f"{num_tokens}: make both from one number"
            )

    def make_scheduler(self) -> SchedulerProtocol:
        """A new, empty scheduler of the policy; raises ValueError for a config that the policy does not support."""
        match self.batching:
            case StaticConfig() as static:
                return StaticScheduler(self.config, static)
            case DynamicConfig() as dynamic:
                return DynamicScheduler(self.config, dynamic)
            case SwapConfig() as swap:
                return SwapScheduler(self.config, swap)
        return make_scheduler(self.config)

    def make_executor(self, replica: int = 0) -> Executor:
        """A simulated executor over the cost model; its noise, if there is any, is that replica's own."""
        if self.noise_seed is None or not isinstance(self.cost, FittedCost):
            return SimExecutor(self.cost, self.swap_cost, self.drafting)
        noise = StepNoise(self.cost, self.noise_seed, replica)
        return NoisySimExecutor(self.cost, noise, self.swap_cost, self.drafting)
