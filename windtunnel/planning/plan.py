"""``plan``: the cheapest deployment that keeps the objectives, and everything that a buyer asks next."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.capacity.evaluate import check_objectives
from windtunnel.planning.analysis import analyse
from windtunnel.planning.answer import NOTHING_FITS, NOTHING_HOLDS, answer, ranking
from windtunnel.planning.candidates import GPUS_PER_HOST, KV_DTYPES, Space
from windtunnel.planning.load import Growth, demand_of, growth_from, refused_share
from windtunnel.planning.offers import Offer, read_offers
from windtunnel.planning.outputs import scenario_table, serve_line, toml_text
from windtunnel.planning.progress import Stage
from windtunnel.planning.question import (
    Question,
    cut_short,
    model_path,
    objectives_of,
    scaled_workload,
    table_of,
    workload_of,
)
from windtunnel.planning.search import Tried, search
from windtunnel.scenarios.economics import DEFAULT_CURRENCY
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.load import Loaded, Override, load_scenario
from windtunnel.scenarios.schema import Scenario
from windtunnel.sim.deployment.engine_args import ENGINE
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model, short_name
from windtunnel.sim.deployment.versions import profile
from windtunnel.sim.workload import Workload
from windtunnel.workers import Workers

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_MONTHS = 12
MOST_SPARE = 1000


class Plan:
    """The answer: what to buy, what it costs, what it rests on."""

    def __init__(self, told: dict[str, Any], scenario: dict[str, Any] | None) -> None:
        self.told = told
        """All of it, as plain data; ``docs/plan.md`` describes the keys."""
        self.scenario = scenario
        """The recommended deployment as a scenario that ``windtunnel simulate`` runs; None if there is none."""

    @property
    def verdict(self) -> str:
        """``holds``, ``nothing_holds`` or ``nothing_fits``."""
        return str(self.told["verdict"])

    @property
    def fits(self) -> bool:
        """Whether vLLM starts with any candidate."""
        return self.verdict != NOTHING_FITS

    @property
    def holds(self) -> bool:
        """Whether a deployment was found that keeps the objectives."""
        return self.verdict not in (NOTHING_FITS, NOTHING_HOLDS)

    @property
    def recommended(self) -> dict[str, Any] | None:
        """The cheapest deployment that holds; None if there is none."""
        found: dict[str, Any] | None = self.told["recommended"]
        return found

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """One row a candidate that was simulated, cheapest first."""
        import pandas as pd

        return pd.DataFrame(candidate_rows(self.told))

    def to_dict(self) -> dict[str, Any]:
        """All of it, as plain data; the same question gives the same bytes."""
        return self.told

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.told, indent=2, ensure_ascii=False, allow_nan=False)

    def text(self) -> str:
        """The answer for a terminal."""
        from windtunnel.reports.plan_text import plan_text

        return plan_text(self.told)

    def markdown(self) -> str:
        """The answer for a pull request or an issue."""
        from windtunnel.reports.plan_markdown import plan_markdown

        return plan_markdown(self.told)

    def report(self, path: str | Path) -> None:
        """Write one HTML file that works offline.  Raises OutputError if it cannot be written."""
        from windtunnel.reports.plan_html import write_plan_html
        from windtunnel.rundir import writing

        with writing(Path(path)):
            write_plan_html(path, self.told)

    def save_candidates(self, path: str | Path) -> None:
        """Write the candidates as CSV, or as Parquet where the name ends so.  Raises OutputError if that fails."""
        from windtunnel.rundir import writing

        with writing(Path(path)):
            if Path(path).suffix == ".parquet":
                self.candidates.to_parquet(path, index=False)
            else:
                self.candidates.to_csv(path, index=False)

    def save_scenario(self, path: str | Path) -> None:
        """Write the recommended deployment as a scenario file.

        Raises ValueError where there is none, OutputError if it cannot be written.
        """
        from windtunnel.reports.files import atomic_writer
        from windtunnel.rundir import writing

        if self.scenario is None:
            raise ValueError("no deployment is recommended, so there is no scenario of it")
        with writing(Path(path)), atomic_writer(path) as file:
            file.write(toml_text(self.scenario))

    def __repr__(self) -> str:
        best = self.recommended
        what = self.verdict if best is None else f"{best['num_replicas']} replicas of {best['label']}"
        return f"<Plan {what}>"


def candidate_rows(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The candidates as flat rows: what a table holds."""
    flat = []
    for row in told["candidates"]:
        needed, cost, bill = row["replicas_needed"] or {}, row["cost_interval"] or {}, row["bill"] or {}
        one = {
            key: row[key]
            for key in (
                *("model", "gpu", "tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype"),
                *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "is_default"),
                *("calibrated", "evidence", "profile", "num_replicas", "num_gpus", "is_verified"),
                *("cost_per_hour", "binding"),
                *("worst", "busy_share", "kv_usage_peak", "num_running_peak", "num_preemptions", "num_kv_tokens"),
            )
        }
        one |= {f"replicas_needed_{key}": needed.get(key) for key in ("mean", "low", "high")}
        one |= {f"cost_per_hour_{key}": cost.get(key) for key in ("low", "high")}
        one |= {key: bill.get(key) for key in ("per_million_input_tokens", "per_million_output_tokens")}
        one |= {key: bill.get(key) for key in ("per_million_tokens", "watts")}
        one |= {each["text"]: each["measured"] for each in row["objectives"] or ()}
        flat.append(one)
    return flat


def plan(
    scenario: str | Path | Mapping[str, Any] | Scenario | None = None,
    *,
    gpus: Iterable[str] | Mapping[str, float | None] = (),
    power: Iterable[str] | Mapping[str, Any] = (),
    currency: str | None = None,
    models: Sequence[str] = (),
    tensor_parallel_sizes: Sequence[int] | None = None,
    pipeline_parallel_sizes: Sequence[int] | None = None,
    kv_cache_dtypes: Sequence[str] | None = None,
    max_num_seqs: Sequence[int] | None = None,
    max_num_batched_tokens: Sequence[int] | None = None,
    gpu_memory_utilizations: Sequence[float] | None = None,
    gpus_per_host: int | None = None,
    uncalibrated: bool | None = None,
    spare_replicas: int | None = None,
    scale: float = 1.0,
    growth: str | float | None = None,
    months: int | None = None,
    seed: int | None = None,
    replications: int = 5,
    num_requests: int = 1500,
    jobs: int | None = None,
    ray: str | None = None,
    tell: Callable[[str], None] | None = None,
    overrides: Mapping[str, Override] | None = None,
    reproduce: str = "",
    **settings: Any,
) -> Plan:
    """The cheapest deployment that serves a workload within its objectives, and the runners-up.

    ``scenario`` and ``settings`` say what is served, how it is asked for and what must hold, as for ``simulate``; what
    they say of GPUs, splits and knobs limits the choice.  ``gpus`` are the cards to choose from with what an hour of
    one costs (``{"h100-sxm": 2.49}`` or ``["h100-sxm=2.49"]``; what has none takes that of [price], and without prices
    the fewest cards win), ``power`` their draw in watts.  The lists are what is tried; what is left out is a small set
    around vLLM's defaults, tensor parallelism all powers of two that ``gpus_per_host`` cards hold.  ``spare_replicas``
    are bought beside those that are needed.  ``scale`` plans for so many times the load: a trace is replayed faster, a
    synthetic workload has more requests in the same time; ``growth`` (``"5%/month"``) looks ahead.

    The same question and seed give the same answer, whatever ``jobs`` (local processes) or ``ray``.

    Raises ScenarioError, TraceError and ScenarioUnreadable as ``simulate``, ValueError for lists, prices or objectives
    that mean nothing.

    >>> plan("chat-8b-h100", gpus={"h100-sxm": 2.49, "l40s": 0.86}).recommended  # doctest: +SKIP
    """
    given = {**(overrides or {}), **{key: Override(value, f"{key}=") for key, value in settings.items()}}
    if seed is not None:
        given["seed"] = Override(seed, "seed=")
    loaded = load_scenario(scenario, given)
    asked = loaded.scenario.plan
    if currency is not None and not currency.strip():
        raise ValueError("currency is blank: give a word such as EUR, or leave it out")
    offers = _offers(loaded, gpus, power)
    question = make_question(loaded, scale, replications, num_requests)
    space = Space(
        _models(loaded, models),
        offers,
        _chosen(
            tensor_parallel_sizes, asked.tensor_parallel_size_choices, loaded.scenario.deployment.tensor_parallel_size
        ),
        _chosen(
            pipeline_parallel_sizes,
            asked.pipeline_parallel_size_choices,
            loaded.scenario.deployment.pipeline_parallel_size,
        )
        or (1,),
        _chosen(kv_cache_dtypes, asked.kv_cache_dtype_choices, loaded.scenario.deployment.kv_cache_dtype) or KV_DTYPES,
        _chosen(max_num_seqs, asked.max_num_seqs_choices, loaded.scenario.engine.max_num_seqs),
        _chosen(
            max_num_batched_tokens, asked.max_num_batched_tokens_choices, loaded.scenario.engine.max_num_batched_tokens
        ),
        _chosen(
            gpu_memory_utilizations,
            asked.gpu_memory_utilization_choices,
            loaded.scenario.deployment.gpu_memory_utilization,
        ),
        next((each for each in (gpus_per_host, asked.gpus_per_host) if each is not None), GPUS_PER_HOST),
        _fixed(loaded),
        profile(loaded.scenario.deployment.engine_version or ENGINE),
    )
    space, notes = _with_length(space, question)
    spare = spare_replicas if spare_replicas is not None else (asked.spare_replicas or 0)
    if not 0 <= spare <= MOST_SPARE:
        raise ValueError(f"spare_replicas must be from 0 to {MOST_SPARE:,}, got {spare:,}: 1 is N+1")
    if growth is None and asked.growth is not None:
        with _named(loaded, "growth in [plan]"):
            _growth(asked.growth, DEFAULT_MONTHS)
    if growth is None and asked.growth is None:
        if months is not None:
            raise ValueError(f"months ({months}) without growth say nothing: give growth too, such as 5%/month")
        if asked.months is not None:
            notes = [*notes, "months of [plan] are left aside: no growth is given."]
    num_months = next((each for each in (months, asked.months) if each is not None), DEFAULT_MONTHS)
    grown = _growth(growth if growth is not None else asked.growth, num_months)
    say = tell or _say_nothing
    with Workers(jobs, ray=ray) as workers:
        found = search(
            question,
            space,
            workers,
            with_uncalibrated=bool(uncalibrated if uncalibrated is not None else asked.uncalibrated),
            spare=spare,
            tell=say,
        )
        order = ranking(found, spare)
        chosen = order[0] if order else None
        analysis = None
        if chosen is not None:
            analysis = analyse(question, chosen, workers, spare=spare, stage=Stage(say))
    cut, is_even = cut_short(table_of(loaded)["workload"], scale), question.is_steady
    told = answer(
        question,
        space,
        found,
        chosen,
        analysis,
        currency=currency or loaded.scenario.price.currency or DEFAULT_CURRENCY,
        priced_elsewhere=_priced_elsewhere(loaded, offers),
        spare=spare,
        growth=grown,
        notes=[
            *notes,
            *_lengths(question, space, chosen),
            *([cut] if cut and is_even else []),
            *workload_of(question).notes,
        ],
        warnings=[cut] if cut and not is_even else [],
        reproduce=reproduce,
    )
    made = None
    if chosen is not None and analysis is not None:
        made = scenario_table(question, chosen, analysis.num_replicas + spare, currency=told["currency"])
        told["serve_command"] = serve_line(question, space, chosen)
        told["scenario"] = toml_text(made)
    return Plan(told, made)


@contextmanager
def _named(loaded: Loaded, what: str) -> Iterator[None]:
    """Says of which place of which file a ValueError is."""
    try:
        yield
    except ValueError as error:
        raise ScenarioError(f"{loaded.origin}: {what}: {error}") from None


def _say_nothing(text: str) -> None:
    del text


def _chosen(given: Sequence[Any] | None, listed: Sequence[Any] | None, single: Any) -> tuple[Any, ...] | None:
    """What was given, else what [plan] lists, else the scenario's one value, else nothing."""
    for values in (given, listed):
        if values is not None:
            if not values:
                raise ValueError("a list of what is tried is empty: give at least one value, or leave the list out")
            return tuple(dict.fromkeys(values))
    return None if single is None else (single,)


def _offers(loaded: Loaded, gpus: Iterable[str] | Mapping[str, float | None], power: Any) -> tuple[Offer, ...]:
    """The cards to choose from: those given, else those of [plan] and [price], else the scenario's own."""
    scenario = loaded.scenario
    prices = scenario.price.gpu_hour

    def listed_price(gpu: str) -> float | None:
        return _price_of(prices, gpu)

    if not gpus:
        names = scenario.plan.gpus or (list(prices) if isinstance(prices, dict) else [])
        names = names or ([scenario.deployment.gpu] if scenario.deployment.gpu else [])
        with _named(loaded, "gpus of [plan], [price] or [deployment]"):
            gpus = dict.fromkeys(names)
            if names:
                read_offers(gpus, (), listed_price)
    offers = read_offers(gpus, power or (), listed_price)
    return offers if power else tuple(_with_power(offer, scenario) for offer in offers)


def _priced_elsewhere(loaded: Loaded, offers: Sequence[Offer]) -> tuple[str, ...]:
    """Cards with a price under [price] that are not to choose from."""
    prices, offered = loaded.scenario.price.gpu_hour, {offer.gpu for offer in offers}
    names = [load_gpu(name).name for name in prices] if isinstance(prices, dict) else []
    return tuple(name for name in names if name not in offered)


def _price_of(prices: float | dict[str, float] | None, name: str) -> float | None:
    if not isinstance(prices, dict):
        return prices
    by_name = {load_gpu(each).name: value for each, value in prices.items()}
    return by_name.get(load_gpu(name).name)


def _with_power(offer: Offer, scenario: Scenario) -> Offer:
    busy, idle = (_price_of(getattr(scenario.power, key), offer.gpu) for key in ("busy_watts", "idle_watts"))
    return offer if busy is None else replace(offer, busy_watts=busy, idle_watts=idle)


def _models(loaded: Loaded, models: Sequence[str]) -> tuple[str, ...]:
    wanted = tuple(models) or ((loaded.scenario.deployment.model,) if loaded.scenario.deployment.model else ())
    if not wanted:
        raise ScenarioError(
            f"{loaded.origin}: no model: give --model or model under [deployment] (windtunnel models lists them)"
        )
    return tuple(dict.fromkeys(model_path(loaded, name) for name in wanted))


def _fixed(loaded: Loaded) -> dict[str, Any]:
    deployment, engine = loaded.scenario.deployment, loaded.scenario.engine
    return {
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "usage_context": deployment.usage_context,
        "dtype": deployment.dtype,
    }


def make_question(loaded: Loaded, scale: float, replications: int, num_requests: int) -> Question:
    """The question of a scenario.  Raises ValueError for numbers and objectives that mean nothing."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite, got {scale:g}: 2 is twice the load")
    if not 1 <= replications <= 100:
        raise ValueError(f"replications must be from 1 to 100, got {replications}")
    if num_requests < 100:
        raise ValueError(f"num_requests must be at least 100, got {num_requests}: fewer say little about a percentile")
    table = table_of(loaded)
    question = Question(
        {**table, "workload": scaled_workload(table["workload"], scale)},
        tuple(loaded.scenario.slo.objectives),
        tuple(loaded.scenario.slo.goodput),
        loaded.scenario.seed or 0,
        scale,
        num_requests,
        replications,
    )
    check_objectives(*objectives_of(question))
    return question


def _with_length(space: Space, question: Question) -> tuple[Space, list[str]]:
    """Each model with its max_model_len: the one that is given, as far as the model goes, else the power of two that
    holds the longest request, as far as the model goes.
    """
    longest = demand_of(workload_of(question)).longest_tokens
    given = space.fixed.get("max_model_len")
    if given is not None and len(space.models) == 1:
        return space, []
    lengths, notes = {}, []
    for name in space.models:
        own = load_model(name).max_model_len
        wanted = max(2048, 2 ** (longest - 1).bit_length()) if given is None else int(given)
        length = lengths[name] = min(wanted, own)
        if given is None and length < own:
            notes.append(_why_length(name, length, longest, own, len(space.models) > 1))
        elif given is not None and length < wanted:
            notes.append(f"max_model_len of {short_name(name)} is {own:,}, the most it can, not {wanted:,}.")
    alike = set(lengths.values())
    common = lengths[space.models[0]] if len(alike) == 1 else None
    return replace(space, fixed={**space.fixed, "max_model_len": common}, max_model_lens=lengths), notes


def _why_length(name: str, length: int, longest: int, own: int, is_one_of_several: bool) -> str:
    of = f" of {short_name(name)}" if is_one_of_several else ""
    return (
        f"max_model_len{of} is {length:,}, for the longest request of the workload ({longest:,} tokens); vLLM's own "
        f"default, {own:,}, would ask for a KV cache that holds one request of that length. --max-model-len "
        "sets another."
    )


def _lengths(question: Question, space: Space, chosen: Tried | None) -> Iterator[str]:
    """What max_model_len does to requests that are longer, for the recommended model, else for each."""
    workload = workload_of(question)
    for name in space.models if chosen is None else (chosen.shape.model,):
        length = space.max_model_lens.get(name) or space.fixed.get("max_model_len")
        if length is not None:
            yield from _beyond(workload, int(length), short_name(name) if len(space.models) > 1 else "")


def _beyond(workload: Workload, length: int, model: str) -> Iterator[str]:
    refused = round(refused_share(workload, length) * len(workload))
    cut = int((workload.num_prompt_tokens + workload.num_output_tokens > length).sum()) - refused
    of = f" of {model}" if model else ""
    if refused or cut > 0:
        yield (
            f"Of {len(workload):,} requests {refused:,} have prompts of max_model_len{of} ({length:,}) or more and are "
            f"refused, {max(cut, 0):,} reach it before their output ends and are cut there, as vLLM does."
        )


def _growth(text: str | float | None, months: int) -> Growth | None:
    if text is None:
        return None
    return growth_from(text, months)


__all__ = ["Plan", "Tried", "candidate_rows", "plan"]
