"""What the server knows and does, without HTTP: checks requests, makes prompts, starts generations, swaps executors."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.executor.engine import RealExecutor
from windtunnel.executor.model_files import read_generation_config
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.server.engine_loop import EngineDead, EngineLoop, QueueFull
from windtunnel.executor.server.executors import Executors, ExecutorUnavailable, weights_source
from windtunnel.executor.server.fork import Forks
from windtunnel.executor.server.generation import Generation, Stops
from windtunnel.executor.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TokenizeRequest,
    not_found,
    unavailable,
)
from windtunnel.executor.server.tokenizer import ChatTemplate, Tokenizer
from windtunnel.executor.shadow import Drift, ShadowMetrics
from windtunnel.sim.engine.protocols import CostModel

_LONG_TEXT_CHARS = 20_000
"""Texts from here on are tokenised in a thread, so that other requests need not wait."""


log = logging.getLogger("windtunnel.server")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets: OpenAI's defaults, or those of the model's ``generation_config.json``."""

    temperature: float = 1.0
    top_p: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, besides those of ``config.json``."""


def read_sampling_defaults(folder: Path | None, vocab_size: int | None = None) -> SamplingDefaults:
    """From ``generation_config.json``, where the folder has one, as vLLM does by default.

    Raises ModelFileError (a ValueError) if it cannot be read or holds values that no request may have.
    """
    config = read_generation_config(folder, vocab_size)
    return SamplingDefaults(
        1.0 if config.temperature is None else config.temperature,
        1.0 if config.top_p is None else config.top_p,
        config.eos_token_ids,
    )


@dataclass
class Frontend:
    """A served model."""

    loop: EngineLoop
    executors: Executors
    kind: str
    """Of the executor that runs now."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_names: tuple[str, ...]
    """Names that it answers to; answers carry the first."""
    model_root: str
    """What was given as model."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    seed: int = 0
    """Of the draws of requests that bring no seed of their own."""
    default_output_tokens: int | None = None
    """Tokens after which a made-up answer ends whose request sets no limit; None: it goes on to the context's end."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    cost: CostModel | None = None
    """Prices the steps of forks."""
    shadow: CostModel | None = None
    """The same while a model is computed."""
    drifts: dict[str, Drift] = field(default_factory=dict)
    """How far the shadow is off, by kind of executor."""

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self._swapping = asyncio.Lock()
        config = self.loop.engine.scheduler.config
        self.max_model_len = config.max_model_len
        self._has_priorities = config.policy == "priority"
        self.forks = Forks(self.loop, self.cost, self.shadow)
        self.more_metrics = () if self.shadow is None else (ShadowMetrics(self.drifts),)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]

    async def complete(self, request: CompletionRequest) -> Generation:
        """Start to answer; raises ApiError for what cannot be served."""
        self._check(request)
        prompts = await self._prompts(request)
        return self._start(request, prompts, 16 if request.max_tokens is None else request.max_tokens)

    async def chat(self, request: ChatRequest) -> Generation:
        """Start to answer; raises ApiError for what cannot be served."""
        self._check(request)
        prompt = await self._chat_prompt(
            request.messages, request.add_generation_prompt, request.chat_template_kwargs, request.add_special_tokens
        )
        given = request.max_completion_tokens
        max_tokens = request.max_tokens if given is None else given
        if max_tokens is not None:
            return self._start(request, [prompt], max_tokens)
        rest = max(1, self.max_model_len - len(prompt))
        return self._start(request, [prompt], rest, ends_after=self.default_output_tokens)

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Token ids of a prompt; raises ApiError for messages that cannot be rendered."""
        self.check_model(request.model)
        if request.messages is not None:
            return await self._chat_prompt(
                request.messages,
                request.add_generation_prompt,
                request.chat_template_kwargs,
                request.add_special_tokens,
            )
        return await self._encode(request.prompt or "", request.add_special_tokens is not False)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served; no name is any."""
        if name and name not in self.model_names:
            raise not_found(f"the model {name[:200]!r} does not exist; served: {', '.join(self.model_names)}")

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raises ApiError for a token that the model does not have."""
        largest = max(token_ids, default=0)
        if largest >= self.tokenizer.vocab_size:
            raise ApiError(
                f"token id {_short_int(largest)} is out of vocabulary: ids go up to {self.tokenizer.vocab_size - 1}",
                param="prompt",
            )

    async def swap(self, kind: str) -> int:
        """Let an executor of another kind run the next steps; returns the tokens that it had to compute anew.

        Raises ApiError if there is none of that kind or it refuses.
        """
        async with self._swapping:
            try:
                executor = await asyncio.to_thread(self.executors.get, kind)
                num_tokens = await self.loop.swap(executor)
            except (ExecutorUnavailable, ValueError) as error:
                raise ApiError(str(error), param="kind") from error
            except EngineDead as error:
                raise unavailable(str(error)) from error
            self.kind = kind
            source = weights_source(executor)
            log.info("Steps are run by the %s executor%s", kind, "" if source is None else f". Weights: {source}")
            return num_tokens

    # -- from a request to jobs

    def _check(self, request: SamplingFields) -> None:
        self.check_model(request.model)
        unsupported = request.unsupported()
        if isinstance(self.loop.engine.executor, RealExecutor):
            unsupported += request.unsampled()
        if unsupported:
            raise ApiError(f"not supported here: {', '.join(unsupported)}; leave it out", param=unsupported[0])
        if request.priority and not self._has_priorities:
            raise ApiError("a priority other than 0 needs a server with --scheduling-policy priority", param="priority")

    async def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        given = request.prompt
        if given is None or given in ("", []):
            raise ApiError("the prompt is empty: give at least one token", param="prompt")
        several: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        add_special = request.add_special_tokens is not False
        return [await self._encode(each, add_special) if isinstance(each, str) else list(each) for each in several]

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def _chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: dict[str, Any] | None,
        add_special_tokens: bool | None,
    ) -> list[int]:
        if self.chat_template is None:
            raise ApiError("the model's folder has no chat template, so it can only complete prompts", param="messages")
        rendered = [message.for_template() for message in messages]
        own = {key: value for key, value in (variables or {}).items() if key not in ("messages", "self")}
        own.setdefault("add_generation_prompt", add_generation_prompt)
        try:
            text = self.chat_template.render(rendered, **own)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error
        return await self._encode(text, bool(add_special_tokens))

    def _start(
        self, request: SamplingFields, prompts: list[list[int]], max_tokens: int, ends_after: int | None = None
    ) -> Generation:
        params = [self._sampling_params(request, max_tokens) for _ in prompts]
        for prompt in prompts:
            self._check_prompt(prompt, max_tokens)
        stops = Stops(_stop_texts(request.stop), request.include_stop_str_in_output)
        try:
            return Generation(
                self.loop,
                self.tokenizer,
                prompts,
                params,
                stops,
                priority=request.priority,
                cache_salt=request.cache_salt,
                ends_after=ends_after,
                skip_special_tokens=request.skip_special_tokens,
            )
        except (QueueFull, EngineDead) as error:
            raise unavailable(str(error)) from error

    def _sampling_params(self, request: SamplingFields, max_tokens: int) -> SamplingParams:
        temperature, top_p = request.temperature, request.top_p
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=self.defaults.temperature if temperature is None else temperature,
                top_p=self.defaults.top_p if top_p is None else top_p,
                seed=self._seeds.getrandbits(63) if request.seed is None else request.seed,
                ignore_eos=request.ignore_eos,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                min_tokens=request.min_tokens,
            )
        except ValueError as error:
            raise ApiError(str(error), param=str(error).split()[0]) from error

    def _check_prompt(self, prompt: list[int], max_tokens: int) -> None:
        if not prompt:
            raise ApiError("the prompt is empty: give at least one token", param="prompt")
        self.check_token_ids(prompt)
        if len(prompt) + max_tokens > self.max_model_len:
            raise ApiError(
                f"this model's context is {self.max_model_len} tokens, but the prompt has {len(prompt)} and "
                f"{_short_int(max_tokens)} more were asked for: shorten the prompt or lower max_tokens",
                param="max_tokens",
            )


def _stop_texts(given: str | list[str] | None) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in texts:
        raise ApiError("a stop string cannot be empty", param="stop")
    return texts


def _short_int(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
