"""What a deployment costs: by the hour, by the month, and for a million tokens; and what it draws."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.planning.load import Demand
from windtunnel.planning.offers import Offer

HOURS_PER_MONTH = 730
"""365 * 24 / 12."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Bill:
    """Money in the user's currency, energy in watts and watt-hours; None where no price or no power was given.

    Tokens are those of the demand at its mean rate: give the one that is served.  A million input (output) tokens cost
    what the GPUs cost in the share of their busy time that went into prompts (into output), idle time divided in the
    same way, so that the bill for both together is the whole one.
    """

    num_gpus: int
    per_hour: float | None
    per_month: float | None
    per_million_input_tokens: float | None
    per_million_output_tokens: float | None
    per_million_tokens: float | None
    """Input and output together, blended."""
    per_million_output_tokens_alone: float | None
    """The whole bill over the output tokens, as if prompts were free."""
    watts: float | None
    kwh_per_month: float | None
    wh_per_million_tokens: float | None


def bill_of(
    offer: Offer, num_gpus: int, demand: Demand, *, prefill_share: float | None, busy_share: float, load: float = 1.0
) -> Bill:
    """The bill of so many cards that serve ``load`` times the demand.

    ``prefill_share`` is the share of busy time that went into prompts (None where it is not known), ``busy_share`` that
    of all time in which steps ran.
    """
    inputs, outputs = load * demand.input_tokens_per_hour, load * demand.output_tokens_per_hour
    per_hour = None if offer.price_per_hour is None else num_gpus * offer.price_per_hour
    card_watts = offer.watts(busy_share)
    watts = None if card_watts is None else num_gpus * card_watts
    return Bill(
        num_gpus=num_gpus,
        per_hour=per_hour,
        per_month=_times(per_hour, HOURS_PER_MONTH),
        per_million_input_tokens=_part(per_hour, prefill_share, inputs),
        per_million_output_tokens=_part(per_hour, None if prefill_share is None else 1 - prefill_share, outputs),
        per_million_tokens=_part(per_hour, 1.0, inputs + outputs),
        per_million_output_tokens_alone=_part(per_hour, 1.0, outputs),
        watts=watts,
        kwh_per_month=_times(watts, HOURS_PER_MONTH / 1000),
        wh_per_million_tokens=_part(watts, 1.0, inputs + outputs),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _part(per_hour: float | None, share: float | None, tokens_per_hour: float) -> float | None:
    if per_hour is None or share is None or not tokens_per_hour > 0:
        return None
    return per_hour * share * MILLION / tokens_per_hour
