"""One HTTP request on its way: its prompts as jobs of the engine, their tokens as text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.server.engine_loop import Delta, EngineLoop, Job, Taken
from windtunnel.executor.server.protocol import ApiError, failed
from windtunnel.executor.server.tokenizer import Detokenizer, Tokenizer


class Stops(NamedTuple):
    """What besides tokens ends an answer."""

    texts: tuple[str, ...] = ()
    include: bool = False
    """Whether the text (or token) that ends an answer is part of it."""


class AnswerText:
    """The text of one answer, which ends before a stop string.

    As much text is held back as might still become one, so what was given out never has to be taken back.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Stops, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_held_chars = 0 if stops.include or not stops.texts else max(map(len, stops.texts)) - 1
        self._pending = ""
        self._tail = ""  # what was given out last, for stop strings that began there
        self.stop: str | None = None
        """The stop string that was found."""

    def add(self, token_id: int) -> None:
        """Take a token."""
        self._num_tokens += 1
        self._take(self._detokenizer.add(token_id))

    def end(self) -> None:
        """No more tokens will come."""
        self._take(self._detokenizer.end())
        self._num_held_chars = 0

    def new(self) -> str:
        """The text that is certain since the last call."""
        cut = len(self._pending) - (0 if self.stop is not None else self._num_held_chars)
        if cut <= 0:
            return ""
        text, self._pending = self._pending[:cut], self._pending[cut:]
        longest = max(map(len, self._stops.texts), default=1)
        self._tail = (self._tail + text)[-(longest - 1) :] if longest > 1 else ""
        return text

    def _take(self, text: str) -> None:
        if not text or self.stop is not None:
            return
        num_before = len(self._pending)
        self._pending += text
        if self._stops.texts and self._num_tokens >= self._min_tokens:
            self._find_stop(num_before)

    def _find_stop(self, num_before: int) -> None:
        """Cut at the first stop string that ends behind the first ``num_before`` pending characters."""
        text, offset = self._tail + self._pending, len(self._tail)
        found = []
        for stop in self._stops.texts:
            start = text.find(stop, max(0, offset + num_before - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        if found:
            start, self.stop = min(found)
            end = start + len(self.stop) if self._stops.include else start
            self._pending = self._pending[: max(0, end - offset)]


class Piece(NamedTuple):
    """News of one answer."""

    choice: int
    """Number of the answer."""
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    num_tokens: int
    """Of the answer, these included."""
    num_cached_tokens: int
    """Of its prompt, found in the prefix cache."""


class Answer:
    """One prompt and what has been answered."""

    def __init__(self, index: int, prompt_token_ids: list[int], text: AnswerText) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.job: Job | None = None
        self.is_over = False
        self._text = text

    def take(self, delta: Delta, stops: Stops) -> Piece:
        """Turn new tokens into news."""
        self.num_cached_tokens = delta.num_cached_tokens
        text, taken, reason = self._text, 0, delta.finish_reason
        is_silent_end = reason == "stop" and not stops.include  # the token that ends an answer is not part of its text
        for token_id in delta.token_ids:
            taken += 1
            if is_silent_end and taken == len(delta.token_ids):
                break
            text.add(token_id)
            if text.stop is not None:
                break
        self.num_tokens += taken
        if reason is not None and text.stop is None:
            text.end()
        stop_reason: int | str | None = delta.stop_reason
        if text.stop is not None:
            reason, stop_reason = "stop", text.stop
        self.is_over = reason is not None
        token_ids = delta.token_ids[:taken]
        return Piece(self.index, text.new(), token_ids, reason, stop_reason, self.num_tokens, self.num_cached_tokens)


class Generation:
    """All answers of one request; iterate over it for the news, and close it whatever happens."""

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        stops: Stops,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        ends_after: int | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """Submits the prompts, each with its parameters; ``ends_after`` is that of ``Engine.add``.

        Raises QueueFull or EngineDead if they are not taken.
        """
        self._loop = loop
        self._stops = stops
        self._news: deque[Piece | ApiError] = deque()
        self._has_news = asyncio.Event()
        self.answers: list[Answer] = []
        jobs = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
            answer = Answer(index, prompt, AnswerText(detokenizer, stops, own.min_tokens))
            answer.job = Job(prompt, own, _Taker(self, answer), priority, cache_salt, ends_after)
            self.answers.append(answer)
            jobs.append(answer.job)
        loop.submit(jobs)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(answer.prompt_token_ids) for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        """Of all answers so far."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(answer.num_cached_tokens for answer in self.answers)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """News as they come, until all answers are over.  Raises ApiError if one failed."""
        num_open = len(self.answers)
        while num_open:
            await self._has_news.wait()
            self._has_news.clear()
            while self._news:
                news = self._news.popleft()
                if isinstance(news, ApiError):
                    raise news
                num_open -= news.finish_reason is not None
                yield news

    def close(self) -> None:
        """Drop what is not over."""
        for answer in self.answers:
            if answer.job is not None and not answer.is_over:
                self._loop.abort(answer.job)

    def push(self, answer: Answer, delta: Delta) -> Taken:
        """Take what the engine says; returns what of it is answered."""
        self._has_news.set()
        if delta.error is not None:
            self._news.append(failed(delta.error, delta.error_status))
            return Taken(0, "error")
        piece = answer.take(delta, self._stops)
        self._news.append(piece)
        return Taken(len(piece.token_ids), piece.finish_reason)


class _Taker:
    __slots__ = ("_answer", "_generation")

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self._generation = generation
        self._answer = answer

    def __call__(self, delta: Delta) -> Taken:
        return self._generation.push(self._answer, delta)
