"""What is found while a deployment is read, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windtunnel.scenarios.deployments.options import Option, nearest_flags
from windtunnel.scenarios.deployments.settings import SETTINGS, SPECULATIVE_KEYS, complaint
from windtunnel.sim.deployment.versions import profile

_NUMBER = r"v?(\d+\.\d+(?:\.\d+)*(?:\.post\d+)?)"
_IMAGE = re.compile(rf"(?:^|/)vllm-openai(?:-cpu|-rocm)?:{_NUMBER}")
_NAMED_IN_TAG = re.compile(rf":[^/]*vllm[-_.]?{_NUMBER}")
"""As in rocm/vllm:rocm6.4.1_vllm_0.9.1_20250702."""
_OTHERS_IMAGE = re.compile(rf"(?:^|/)[^/:]*vllm[^/:]*:{_NUMBER}(?![\d.])")
"""Somebody else's image with a number that may be vLLM's release, as in rocm/vllm:v0.11.0."""
_HIDDEN_DEVICES = ("", "all", "none", "void", "-1")
_GENERATES = {"runner": ("auto", "generate", "draft"), "task": ("auto", "generate"), "convert": ("auto", "none")}
"""Options that tell what a server makes, and their values for text."""
_MOUNT = "/mnt/models"
"""Where KServe puts a model."""
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")


@dataclass(frozen=True, slots=True)
class ImportedDeployment:
    """One vLLM engine as somebody wrote it down, in windtunnel's keys."""

    name: str
    """The service, container or model it is called by."""
    kind: str
    """Format it was read from, one of ``KINDS``."""
    settings: Mapping[str, Any]
    """What was set, by vLLM's names (``max_num_seqs``).  ``swap_space`` is in bytes, ``cpu_offload_gb`` and
    ``kv_offloading_size`` in GiB as in vLLM; ``speculative_config`` is vLLM's table; ``max_model_len`` -1 is "as long
    as fits".  What is not here was left to vLLM's defaults."""
    sources: Mapping[str, str]
    """For each setting FILE:LINE, or the flag or key where there is no file."""
    num_gpus: int | None = None
    """GPUs that one replica is given; None if nothing says so."""
    num_replicas: int = 1
    """Copies of the whole deployment."""
    engine_version: str | None = None
    """"vllm-0.11.0" where an image tag or a log tells the release and windtunnel knows it."""
    usage_context: str = "api_server"
    """Whose defaults apply: api_server or llm_class."""
    gpu: str | None = None
    """The GPU's name where a node selector tells it, as written there."""
    ignored: tuple[str, ...] = ()
    """Flags of vLLM that were given and play no part."""
    unknown: tuple[str, ...] = ()
    """Flags that vLLM does not have, each with the nearest that it has."""
    notes: tuple[str, ...] = ()
    """Traps, overridden values, unresolved variables: sentences for people."""
    refusals: tuple[str, ...] = ()
    """Those of ``notes`` and ``unknown`` for which vLLM, or what runs it, refuses to start."""
    asks_for_v0: str = ""
    """Where VLLM_USE_V1=0 asks for the older engine, which vLLM has to 0.10, that one of ``notes``; empty else."""


@dataclass(slots=True)
class Reading:
    """Collects settings; a later value takes the place of an earlier one and leaves a note."""

    origin: str
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """Each setting's flag or key, as it was given."""
    options: dict[str, Option] = field(default_factory=dict)
    """All options that were given, by name."""
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    asks_for_v0: str = ""
    num_gpus: int | None = None
    num_replicas: int = 1
    release: str = ""
    """As an image tag or a log has it: "0.11.0"."""
    gpu: str | None = None
    usage_context: str = "api_server"
    mounted: tuple[str, str] | None = None
    """The model that lies at /mnt/models, and who says so."""

    def give(self, option: Option, value: Any, source: str, written: str) -> None:
        """Take the value of an option; None is "not given"."""
        self.options[option.name] = option
        if option.key not in SETTINGS and option.key not in SPECULATIVE_KEYS:
            self.tell_pooling(option, value)
            self.ignore(option)
        elif value is not None:
            self.set(option.key, value, source, written)
        elif option.key in self.settings:
            self.note(f"{source or written}: {written} None comes later and undoes {self._as_given(option.key)}")
            for table in (self.settings, self.sources, self.written):
                del table[option.key]

    def set(self, key: str, value: Any, source: str, written: str) -> None:
        """Take a setting; ``written`` is the flag or key that it was given by."""
        place = source or written
        if key in self.settings and self.settings[key] != value:
            self.note(f"{place}: {written} {_shown(value)} comes later and takes the place of {self._as_given(key)}")
        self.settings[key], self.sources[key], self.written[key] = value, place, written

    def tell_pooling(self, option: Option, value: object) -> None:
        """Say that a server of embeddings or scores is planned as one that generates."""
        if value is not None and str(value) not in _GENERATES.get(option.key, (str(value),)):
            self.note(f"{option.flag} {value} makes no text; the plan is that of a server that generates")

    def ignore(self, option: Option) -> None:
        """Remember an option that plays no part."""
        self.options[option.name] = option
        self._once(self.ignored, option.flag)

    def refuse_unknown(self, flag: str, source: str, candidates: tuple[str, ...] = ()) -> None:
        """Remember a flag that vLLM does not have."""
        place = f"{source}: " if source else ""
        near = nearest_flags(flag)
        if candidates:
            said = f"may mean {', '.join(candidates[:-1])} or {candidates[-1]}: write one of them in full"
        elif near:
            said = f"is no flag of vLLM: {near[0]} is the nearest"
        else:
            said = "is no flag of vLLM, and none is like it"
        self._once(self.unknown, f"{place}{flag} {said}")
        self._once(self.refusals, f"{place}{flag} {said}")

    def note(self, text: str) -> None:
        """Remember a sentence, once."""
        self._once(self.notes, text)

    def refusal(self, text: str) -> None:
        """Remember a sentence on what keeps the server from starting."""
        self.note(text)
        self._once(self.refusals, text)

    def unresolved(self, names: tuple[str, ...], what: str, source: str) -> None:
        """Say that a variable is not known."""
        variables = ", ".join(f"${name}" for name in names)
        self.note(f"{source + ': ' if source else ''}{what} depends on {variables}, which nothing here sets: give it")

    def image(self, name: str, source: str) -> None:
        """Take the release from the tag of an image, where it is one of vLLM's."""
        match = _IMAGE.search(name) or _NAMED_IN_TAG.search(name)
        other = None if match else _OTHERS_IMAGE.search(name)
        if match:
            self.release = match[1]
        elif other and _is_release(other[1]):
            self.release = other[1]
        elif ":" in name or "/" in name:
            self.note(f"{source + ': ' if source else ''}the image {name} does not tell vLLM's release: give --engine")

    def environment(self, variables: Mapping[str, str], source: str) -> None:
        """Take what environment variables say."""
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            devices = variables.get(name)
            if devices is not None and devices.strip().lower() not in _HIDDEN_DEVICES and "$" not in devices:
                self.devices(len(devices.split(",")), f"{source}: {name}")
        if variables.get("VLLM_USE_V1") == "0":
            told = f"{source}: VLLM_USE_V1=0 asks for the V0 engine, which vLLM has to 0.10; simulations are of V1"
            self.asks_for_v0 = self.asks_for_v0 or told
            self.note(self.asks_for_v0)
        if "VLLM_ATTENTION_BACKEND" in variables and "attention_backend" not in self.settings:
            self.set("attention_backend", variables["VLLM_ATTENTION_BACKEND"], source, "VLLM_ATTENTION_BACKEND")

    def devices(self, count: int, source: str) -> None:
        """Take a number of GPUs; where two places say one, the smaller holds."""
        if self.num_gpus is not None and self.num_gpus != count:
            self.note(f"{source} gives {count} GPUs where another place gives {self.num_gpus}; the smaller counts")
        self.num_gpus = count if self.num_gpus is None else min(count, self.num_gpus)

    def finish(self, name: str, kind: str) -> ImportedDeployment:
        """The deployment, with what only shows when all is read."""
        self._join_speculative()
        self._name_mounted_model()
        version = self._version()
        self._note_gone_flags(version)
        self._note_parallel_size()
        if "model" not in self.settings and not any("model" in note for note in self.notes):
            self.note(f"{self.origin}: no model is named: give one")
        return ImportedDeployment(
            name=name or str(self.settings.get("model", self.origin)),
            kind=kind,
            settings={key: self.settings[key] for key in SETTINGS if key in self.settings},
            sources={key: self.sources[key] for key in SETTINGS if key in self.settings},
            num_gpus=self.num_gpus,
            num_replicas=self.num_replicas,
            engine_version=version,
            usage_context=self.usage_context,
            gpu=self.gpu,
            ignored=tuple(self.ignored),
            unknown=tuple(self.unknown),
            notes=tuple(self.notes),
            refusals=tuple(self.refusals) if kind != "log" else (),  # a server that wrote one did start
            asks_for_v0=self.asks_for_v0,
        )

    def _name_mounted_model(self) -> None:
        """Put the model's name in the place of the path that it is mounted at."""
        if self.mounted is not None and str(self.settings.get("model", _MOUNT)).startswith(_MOUNT):
            self.settings["model"], self.sources["model"] = self.mounted

    def _as_given(self, key: str) -> str:
        """A setting by its flag, value and place."""
        flag, place = self.written[key], self.sources[key]
        return f"{flag} {_shown(self.settings[key])}{'' if place == flag else f' ({place})'}"

    def _once(self, sentences: list[str], text: str) -> None:
        if text not in sentences:
            sentences.append(text)

    def _join_speculative(self) -> None:
        """Fold the short forms into ``speculative_config``, as ``create_speculative_config`` does."""
        table = self.settings.get("speculative_config")
        if isinstance(table, dict):
            table = {str(key).replace("-", "_"): value for key, value in table.items()}
        for option, key in SPECULATIVE_KEYS.items():
            if option not in self.settings:
                continue
            value, source, written = self.settings.pop(option), self.sources.pop(option), self.written.pop(option)
            if isinstance(table, dict) and key in table:
                raise complaint(source, written, value, f"says the same as {key} in speculative_config: leave one out")
            table = {**(table or {}), key: value}
            self.sources.setdefault("speculative_config", source)
        if table is not None:
            self.settings["speculative_config"] = table

    def _version(self) -> str | None:
        if not self.release:
            return None
        try:
            return profile(self.release).name
        except ValueError as error:
            self.note(f"the image or log is of vLLM {self.release}: {error}")
            return None

    def _note_gone_flags(self, version: str | None) -> None:
        release = profile(version).release if version else ""
        for option in self.options.values():
            if release and not option.exists_in(release):
                why = f"came with {option.since}" if option.since and not option.until else f"went with {option.until}"
                self.refusal(f"vLLM {release} refuses {option.flag}, which {why}")
            elif not release and option.until:
                self.refusal(f"{option.flag} is gone since vLLM {option.until}, which refuses to start with it")

    def _note_parallel_size(self) -> None:
        asked = 1
        for key in _PARALLEL:
            asked *= int(self.settings.get(key, 1))
        local = self.settings.get("data_parallel_size_local") or self.settings.get("data_parallel_size", 1)
        if self.num_gpus is None or asked * local == self.num_gpus:
            return
        told = f"{self.origin}: TP, PP and DP take {asked * local} GPUs and it is given {self.num_gpus}:"
        if asked * local < self.num_gpus:
            self.note(f"{told} some stay idle")
        else:
            self.refusal(f"{told} vLLM does not start")


def _is_release(number: str) -> bool:
    try:
        profile(number)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
