"""What changed between releases of vLLM: defaults and rules of each, as read in the source of that release."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.sim.deployment.gpu import GIB, GpuSpec
from windtunnel.sim.deployment.refusal import RefusedByVllm

NOT_VERIFIED = "not verified"
SCOPES = (
    "always",
    "memory",
    "prefix_caching",
    "metrics",
    "long_prefill",
    "chunked_prefill_off",
    "priority",
    "async",
    "pipeline",
    "speculation",
)
"""What a difference has to do with; one of no interest to a run can be left out."""
REPRODUCED = (
    "scheduler_reserve_full_isl",
    "cuda_graphs_inside_utilization",
    "startup_check_reserves_null_block",
    "long_prefill_spares_lone_request",
    "free_blocks_to_front",
)
"""Fields of a profile that a simulation acts on, so that they are no difference."""

_DATA = Path(__file__).with_name("versions.json")


class BatchTier(NamedTuple):
    """Default limits of a batch on one class of cards."""

    label: str
    llm_class: int
    """max_num_batched_tokens of the offline ``LLM`` class."""
    api_server: int
    """max_num_batched_tokens of ``vllm serve``."""
    max_num_seqs: int
    min_memory_gib: int = 0
    names: tuple[str, ...] = ()
    """Parts of the device's name, one of which it must contain; none is any name."""
    other_than: tuple[str, ...] = ()
    """Parts that it must not contain."""

    def holds(self, gpu: GpuSpec) -> bool:
        """Whether the card belongs to this class."""
        name = gpu.name.casefold()
        return (
            gpu.memory_bytes >= self.min_memory_gib * GIB
            and (not self.names or any(part in name for part in self.names))
            and not any(part in name for part in self.other_than)
        )


@dataclass(frozen=True, slots=True)
class V0Engine:
    """The engine before V1, which vLLM 0.8 to 0.10 still ran where it was asked for or V1 lacked something.

    Source: ``vllm/core/scheduler.py``, ``vllm/core/block_manager.py`` and the defaults for V0 in ``EngineArgs``, as
    read in vLLM 0.8.5.post1 and 0.10.2.
    """

    swap_space_gib: float
    """Host memory for swapped KV blocks, for each GPU."""
    max_num_seqs: int = 256
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free."""
    enable_prefix_caching: bool = False
    preemption_mode: str = "recompute, or swap for a request with several sequences (n > 1, beam search)"

    def enable_chunked_prefill(self, max_model_len: int) -> bool:
        """Whether prompts are cut by default: only for contexts above 32,768 tokens."""
        return max_model_len > 32_768

    def max_num_batched_tokens(self, max_model_len: int) -> int:
        """Default token budget of a step: 2,048, or the whole context without chunked prefill."""
        return 2048 if self.enable_chunked_prefill(max_model_len) else max(max_model_len, 2048)


@dataclass(frozen=True, slots=True)
class VersionProfile:
    """One release of vLLM: its V1 engine's defaults for generative models on GPUs, and those rules that changed.

    Rules that no release from 0.8 on changed are no fields: victims of preemption lose all their blocks and stop the
    admissions of that step, at least one token of a cached prompt is computed anew, a block of 16 tokens.
    """

    name: str
    """"vllm-0.11", or with the patch number if it was asked for."""
    release: str
    """The release whose source this is, such as "0.11.2"; of a minor version its last."""
    gpu_memory_utilization: float
    block_size: int
    enable_prefix_caching: bool
    batch_tiers: tuple[BatchTier, ...]
    """Default limits by card; the first that holds counts."""
    budget_within_all_sequences: bool
    """Whether a defaulted max_num_batched_tokens is at most max_num_seqs * max_model_len."""
    seqs_within_budget: bool
    """Whether a defaulted max_num_seqs is at most max_num_batched_tokens; otherwise the clash is refused."""
    forces_chunked_prefill: bool
    """Chunked prefill is on for generative models, whatever is given."""
    async_scheduling: bool
    """Default on GPUs.  It gives way where the executor does not support it, to methods of speculation other than
    those that the release supports with it (EAGLE and MTP from the start), and where the next field says so."""
    async_scheduling_with_pipeline: bool
    """Whether that default also holds with pipeline_parallel_size above 1."""
    use_v2_model_runner: bool | None
    """Default of the second model runner, which matters to pipelines only; None where it depends on the model."""
    watermark: float
    scheduler_reserve_full_isl: bool
    """Admission asks for room for the whole prompt; False is the first chunk."""
    free_blocks_to_front: bool
    """With prefix caching, freed blocks that hold no full prefix go to the front of the free queue; False is that all
    go to its end."""
    long_prefill_spares_lone_request: bool
    """long_prefill_token_threshold does not cut a request that is alone."""
    counts_resumed_prefix_hits: bool
    """The prefix-hit metric counts requests that resume after a preemption."""
    counts_failed_lookups: bool
    """The prefix-hit metric counts every look-up for the head of the queue, admitted or not."""
    cuda_graphs_inside_utilization: bool
    """An estimate for CUDA graphs is taken out of gpu_memory_utilization before KV blocks are counted."""
    startup_check_reserves_null_block: bool
    """One request of max_model_len has to fit without the null block."""
    has_v0_engine: bool
    swap_space_gib: float | None
    """Default of swap_space, which only V0 uses; None where the option is gone."""
    verified: Mapping[str, str] = field(compare=False, repr=False)
    """For each field the release in whose source it was read, or "not verified"."""

    @property
    def label(self) -> str:
        """The name in prose: "vLLM 0.11"."""
        return self.name.replace("vllm-", "vLLM ")

    @property
    def v0(self) -> V0Engine | None:
        """The older engine's own defaults, where this release has it."""
        return V0Engine(self.swap_space_gib or 0.0) if self.has_v0_engine else None

    def batch_tier(self, gpu: GpuSpec) -> BatchTier:
        """Default limits of a batch on this card."""
        return next(tier for tier in self.batch_tiers if tier.holds(gpu))

    def is_at_least(self, release: str) -> bool:
        """Whether it is that release or a later one."""
        return _order(self.release) >= _order(release)

    def missing_options(self) -> tuple[str, ...]:
        """Options of later releases that this one does not know."""
        return tuple(name for name, since in _data()["options_since"].items() if _order(self.release) < _order(since))

    def check_options(self, given: Iterable[str]) -> None:
        """Raise ValueError if one of the options given by name came with a later release only."""
        missing = self.missing_options()
        for name in given:
            if name in missing:
                since = _data()["options_since"][name]
                since = since if _minor(since) == _minor(self.release) else _minor(since)
                raise RefusedByVllm(
                    f"{name} is no option of {self.label}: it came with vLLM {since}; leave it out or take the "
                    f"engine vllm-{since} or a later one"
                )

    def architecture_since(self, architecture: str) -> str | None:
        """The first release that has this architecture, if it came later than this one; None else, also where the
        releases in between were not read.

        Source: the registries of models (``model_executor/models/registry.py``).  Architectures that 0.8.0 has, or
        that no release read has, are not listed.
        """
        known = _data()["architectures"].get(architecture)
        if known is None or _order(self.release) > _order(known[0]):
            return None
        return str(known[1])

    def architecture_until(self, architecture: str) -> str | None:
        """The last release that had this architecture, if it is gone from this one."""
        last = _data()["architectures_until"].get(architecture)
        return str(last) if last is not None and _order(self.release) > _order(last) else None

    def memory_values(self) -> dict[str, Any]:
        """How this release sizes the KV cache and what it refuses: the fields of ``memory_rules.MemoryRules``."""
        return _values(self.release, _data()["memory"])

    def differences(
        self, scopes: Collection[str] = SCOPES, reproduced: Collection[str] = REPRODUCED
    ) -> tuple[str, ...]:
        """Sentences about rules of this release that a simulation does not reproduce.

        ``scopes`` are those that matter to the run, ``reproduced`` the fields of this profile that it acts on.
        Raises ValueError for an unknown scope.
        """
        for scope in scopes:
            if scope not in SCOPES:
                raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        found = [
            f"{self.label}: {entry['text']}."
            for entry in _data()["differences"]
            if entry["scope"] in scopes and entry.get("field") not in reproduced and _applies(entry, self.release)
        ]
        if self.release in _data()["unread"]:
            found.insert(0, f"{self.label} was not read; its defaults and rules are those of the release before.")
        return tuple(found)


def profile(name: str) -> VersionProfile:
    """The release of that name: "vllm-0.11" is the last patch of 0.11, "vllm-0.11.0" that one, "vllm" the latest.

    The prefix may be left out.  Raises ValueError, naming the nearest and all allowed, for a name that is none.
    """
    return _profile(name.strip().casefold())


def profile_names() -> tuple[str, ...]:
    """Names of the minor versions, oldest first: "vllm-0.8" and so on."""
    return tuple(dict.fromkeys(f"vllm-{_minor(release)}" for release in _releases()))


@cache
def _profile(name: str) -> VersionProfile:
    number = name.removeprefix("vllm").lstrip("-= ").removeprefix("v")
    last = {_minor(release): release for release in _releases()}
    if not number and name.startswith("vllm"):
        number = _minor(_releases()[-1])
    release = last.get(number, number)
    if release not in _releases():
        raise ValueError(_unknown(name, number))
    read = NOT_VERIFIED if release in _data()["unread"] else release
    values = _values(release, _data())
    return VersionProfile(
        name=f"vllm-{number}",
        release=release,
        batch_tiers=tuple(_tier(entry) for entry in values.pop("batch_tiers")),
        verified=dict.fromkeys(_semantic_fields(), read),
        **values,
    )


def _values(release: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as of a release: those of the first one, and what changed since."""
    values = dict(data["start"])
    for change in data["changes"]:
        if _order(change["release"]) <= _order(release):
            values.update(change["set"])
    return values


def _tier(entry: Mapping[str, Any]) -> BatchTier:
    names = {key: tuple(entry.get(key, ())) for key in ("names", "other_than")}
    return BatchTier(**{**entry, **names})


def _semantic_fields() -> list[str]:
    return [item.name for item in fields(VersionProfile) if item.name not in ("name", "release", "verified")]


def _applies(entry: Mapping[str, str], release: str) -> bool:
    return _order(entry.get("from", "0")) <= _order(release) < _order(entry["until"])


def _unknown(name: str, number: str) -> str:
    names = profile_names()
    near = _nearest(number) or ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.0))
    return (
        f"unknown engine {name!r}{_wrong_part(number)}; nearest: {near}; allowed: {', '.join(names)}, their published "
        "patch releases, vllm"
    )


def _wrong_part(number: str) -> str:
    """Which part of the name is none: the patch of a release, or what follows "vllm" at all."""
    patches = [release for release in _releases() if _minor(release) == _minor(number)]
    if patches:
        return f": {_minor(number)} has no patch release {number} ({', '.join(patches)})"
    return "" if re.fullmatch(r"\d+(\.\d+)*", number) else f": {number!r} is no number of a release"


def _nearest(number: str) -> str:
    """The release at the smallest distance, if it is a number at all."""
    if not re.fullmatch(r"\d+(\.\d+)*", number):
        return ""
    major, minor = (*_order(number), 0, 0)[:2]
    known = [_order(name.removeprefix("vllm-"))[1] for name in profile_names()]
    nearest = known[-1] if major else min(known, key=lambda other: abs(other - minor))
    return f"vllm-0.{nearest}"


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


def _releases() -> list[str]:
    releases: list[str] = _data()["releases"]
    return releases


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _order(release: str) -> tuple[int, ...]:
    """A key by which releases sort: 0.8.5.post1 is after 0.8.5."""
    return tuple(int(part) for part in re.findall(r"\d+", release))
