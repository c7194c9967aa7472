"""What the scenario's GPUs cost and draw, as far as it says it."""

from __future__ import annotations

from windtunnel.scenarios.engine import Hardware
from windtunnel.scenarios.ledger import WINDTUNNEL_DEFAULT, Ledger
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu
from windtunnel.sim.metrics.economics import Rates

DEFAULT_CURRENCY = "USD"
_KEYS = (("price", "gpu_hour"), ("power", "idle_watts"), ("power", "busy_watts"))


def make_rates(ledger: Ledger, hardware: Hardware) -> tuple[Rates, str]:
    """Price and power of the GPUs of one replica, and the currency; what was not given stays None (and empty).

    Raises ScenarioError for a table by name that lacks the scenario's GPU or names one that is not known, and for one
    of the two powers without the other.
    """
    given = {key: _of_gpu(ledger, section, key, hardware.gpu) for section, key in _KEYS}
    for section, key in _KEYS:
        ledger.note(section, key, given[key])
    num_gpus = hardware.tensor_parallel_size * hardware.pipeline_parallel_size
    rates = ledger.attempt("power", ("idle_watts", "busy_watts"), lambda: Rates(num_gpus, **given))
    asked = ledger.loaded.scenario.price.currency
    if rates.gpu_hour is None:
        return rates, ""
    return rates, ledger.pick("price", "currency", asked, DEFAULT_CURRENCY, WINDTUNNEL_DEFAULT)


def _of_gpu(ledger: Ledger, section: str, key: str, gpu: GpuSpec | None) -> float | None:
    value: float | dict[str, float] | None = getattr(getattr(ledger.loaded.scenario, section), key)
    if not isinstance(value, dict):
        return None if value is None else float(value)
    by_name = ledger.attempt(section, key, lambda: _by_gpu(value))
    if gpu is None:
        raise ledger.blame(f"{key} is given by GPU, but the scenario names no GPU: give one number", section, key)
    if gpu.name not in by_name:
        raise ledger.blame(
            f"{key} is given for {', '.join(by_name)}, but the GPU here is {gpu.name}: add it, or give one number",
            section,
            key,
        )
    return by_name[gpu.name]


def _by_gpu(value: dict[str, float]) -> dict[str, float]:
    return {load_gpu(name).name: float(each) for name, each in value.items()}
