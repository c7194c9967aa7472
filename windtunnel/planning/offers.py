"""What may be bought: cards with the prices and the power that the user gave.  Nothing of it is bundled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.sim.deployment.gpu import load_gpu

MOST_PRICE = 1e9
"""Of an hour of one card; more is a slip, whatever the currency."""
_WATTS = re.compile(r"(\d+(?:\.\d+)?)\s*(k?W)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Offer:
    """One kind of card, what an hour of it costs, and what it draws."""

    gpu: str
    """Its name in the table of cards."""
    price_per_hour: float | None = None
    """Of one card, in the user's currency; None where no price was given."""
    busy_watts: float | None = None
    """Drawn by one card, and its share of the host, while a step runs."""
    idle_watts: float | None = None
    """The same while none runs; where it is None and busy_watts is not, as much as when busy (an upper bound)."""

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0 < self.price_per_hour <= MOST_PRICE:
            raise ValueError(
                f"price of {self.gpu} must be above 0 and at most {MOST_PRICE:,.0f}, got {self.price_per_hour:g}: give "
                "what an hour of one card costs"
            )
        for name in ("busy_watts", "idle_watts"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} of {self.gpu} must be at least 0 and finite, got {value:g}")
        if self.idle_watts is not None and (self.busy_watts is None or self.idle_watts > self.busy_watts):
            raise ValueError(
                f"idle power of {self.gpu} ({self.idle_watts:g} W) must not exceed that when busy "
                f"({'not given' if self.busy_watts is None else f'{self.busy_watts:g} W'})"
            )

    def watts(self, busy_share: float) -> float | None:
        """Mean draw of one card that runs steps for this share of the time; None where no power was given."""
        if self.busy_watts is None:
            return None
        idle = self.busy_watts if self.idle_watts is None else self.idle_watts
        return idle + (self.busy_watts - idle) * min(max(busy_share, 0.0), 1.0)


def read_offers(
    gpus: Iterable[str] | Mapping[str, float | None],
    powers: Iterable[str] | Mapping[str, Any] = (),
    listed_price: Callable[[str], float | None] | None = None,
) -> tuple[Offer, ...]:
    """Offers from ``["h100-sxm=2.49", "l40s"]`` or ``{"h100-sxm": 2.49}``, power from ``["h100-sxm=700"]``.

    Power may be given as idle and busy, ``h100-sxm=120:700``, in watts.  A card without a price has the one
    that ``listed_price`` knows.  Raises ValueError for a card that nobody
    knows, one that is named twice, a price or a power that is none, and power for a card that is not offered.
    """
    priced = list(gpus.items()) if isinstance(gpus, Mapping) else [_price(text) for text in gpus]
    if not priced:
        raise ValueError("no GPU to choose from: give --gpu NAME=PRICE for each, such as --gpu h100-sxm=2.49")
    drawn: dict[str, tuple[float | None, float]] = {}
    for name, watts in map(_power, _pairs(powers)):
        if name in drawn:
            raise ValueError(f"power of {name} is given twice: give it once, as NAME=WATTS or NAME=IDLE:BUSY")
        drawn[name] = watts
    offers: dict[str, Offer] = {}
    for name, price in priced:
        gpu = load_gpu(name).name
        if gpu in offers:
            raise ValueError(f"GPU {gpu} is offered twice: give each card once")
        idle, busy = drawn.pop(gpu, (None, None))
        if price is None and listed_price is not None:
            price = listed_price(gpu)
        offers[gpu] = Offer(gpu, None if price is None else float(price), busy, idle)
    if drawn:
        raise ValueError(f"power is given for {', '.join(drawn)}, which is not offered: add --gpu {next(iter(drawn))}")
    _check_all_priced(list(offers.values()))
    return tuple(offers.values())


def _check_all_priced(offers: list[Offer]) -> None:
    without = [offer.gpu for offer in offers if offer.price_per_hour is None]
    if without and len(without) < len(offers):
        raise ValueError(
            f"no price for {', '.join(without)}, but for other cards: give one for each (--gpu NAME=PRICE), or for "
            "none to rank by the number of GPUs"
        )


def _price(text: str) -> tuple[str, float | None]:
    name, equals, number = (part.strip() for part in text.rpartition("="))
    if not equals:
        return text.strip(), None
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(
            f"--gpu {text!r}: {number!r} is no price; write NAME=PRICE with what an hour of one card costs, such as "
            "h100-sxm=2.49"
        ) from None


def _pairs(powers: Iterable[str] | Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in powers.items()] if isinstance(powers, Mapping) else list(powers)


def _power(text: str) -> tuple[str, tuple[float | None, float]]:
    name, equals, numbers = (part.strip() for part in text.rpartition("="))
    parts = numbers.split(":") if equals else []
    read = [_WATTS.fullmatch(part.strip()) for part in parts]
    if not 1 <= len(parts) <= 2 or not all(read):
        raise ValueError(
            f"--power {text!r} must read NAME=WATTS or NAME=IDLE:BUSY, such as h100-sxm=700 or h100-sxm=120:700"
        )
    watts = [float(match[1]) * (1000 if (match[2] or "").casefold() == "kw" else 1) for match in read if match]
    return load_gpu(name).name, (watts[0] if len(watts) == 2 else None, watts[-1])
