"""Requests and errors of the HTTP interface, as OpenAI and vLLM have them."""

from __future__ import annotations

import json
import logging
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_LONGEST_TEXT = 300
_MOST_ERRORS = 5

log = logging.getLogger("windtunnel.server")

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]  # one complaint is enough: there may be a million items
TokenIds = Several[Annotated[int, Field(ge=0)]]
Seed = Annotated[int, Field(ge=_INT64_MIN, le=_INT64_MAX)]


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape; types are vLLM's."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def not_found(message: str) -> ApiError:
    """404, for a model that is not served."""
    return ApiError(message, 404, "NotFoundError", "model")


def unavailable(message: str) -> ApiError:
    """503: try again later, or elsewhere."""
    return ApiError(message, 503, "Service Unavailable")


def failed(message: str, status: int) -> ApiError:
    """400, 500 or 503, for an answer that broke off."""
    return {400: ApiError, 503: unavailable}.get(status, internal)(message)


def internal(message: str) -> ApiError:
    """500: not the client's fault."""
    return ApiError(message, 500, "InternalServerError")


class _Body(BaseModel):
    """Unknown fields are kept and have no effect, as in vLLM, which logs a warning."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _tell_of_unknown_fields(self) -> _Body:
        if self.model_extra:
            names = list(islice(self.model_extra, _MOST_ERRORS + 1))
            texts = [_short(repr(name[:_LONGEST_TEXT])) for name in names[:_MOST_ERRORS]]
            rest = ["…"] if len(names) > _MOST_ERRORS else []
            log.warning("fields of the request without effect: %s", ", ".join([*texts, *rest]))
        return self


class StreamOptions(_Body):
    """What a stream says besides text."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class SamplingFields(_Body):
    """What both kinds of generation have in common."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    add_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    priority: Seed = 0
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    user: str | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options can only be given with stream=true")
        return self

    def unsupported(self) -> list[str]:
        """Fields that ask for what this server cannot give."""
        asked = {
            "n": self.n not in (None, 1),
            "use_beam_search": self.use_beam_search,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "response_format": bool(self.response_format) and (self.response_format or {}).get("type") != "text",
            "structured_outputs": bool(self.structured_outputs),
            "truncate_prompt_tokens": self.truncate_prompt_tokens is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    def unsampled(self) -> list[str]:
        """Fields that change what is sampled in ways that executors here do not know; simulated ones need not."""
        neutral: dict[str, tuple[object, ...]] = {
            "frequency_penalty": (None, 0.0),
            "presence_penalty": (None, 0.0),
            "repetition_penalty": (None, 1.0),
            "top_k": (None, 0, -1),
            "min_p": (None, 0.0),
            "logit_bias": (None, {}),
            "allowed_token_ids": (None, []),
            "bad_words": (None, []),
        }
        return [name for name, values in neutral.items() if getattr(self, name) not in values]


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: TokenIds | Several[TokenIds] | str | Several[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    prompt_embeds: Any = None

    def unsupported(self) -> list[str]:
        """Fields that ask for what this server cannot give."""
        asked = {
            "logprobs": self.logprobs is not None,
            "echo": bool(self.echo),
            "suffix": bool(self.suffix),
            "best_of": self.best_of not in (None, 1),
            "prompt_embeds": self.prompt_embeds is not None,
        }
        return [*super().unsupported(), *(name for name, is_asked in asked.items() if is_asked)]


class Message(BaseModel):
    """One message of a chat; further fields are handed to the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """As a chat template wants it, its parts joined.  Raises ApiError for parts other than text."""
        return {**(self.model_extra or {}), "role": self.role, "content": self._text()}

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = [part.get("text") for part in self.content if part.get("type", "text") in ("text", "input_text")]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise ApiError("a message's content can only have parts of type 'text' here", param="messages")
        return "\n".join(map(str, texts))


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    def unsupported(self) -> list[str]:
        """Fields that ask for what this server cannot give."""
        asked = {
            "logprobs": bool(self.logprobs),
            "top_logprobs": bool(self.top_logprobs),
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template is not None,
            "tools": bool(self.tools) and self.tool_choice != "none",
        }
        return [*super().unsupported(), *(name for name, is_asked in asked.items() if is_asked)]


class TokenizeRequest(_Body):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


class SwapRequest(_Body):
    """``POST /windtunnel/executor``."""

    kind: str


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], content_type: str, data: bytes) -> Body:
    """The body of a request.  Raises ApiError (400) that says what is wrong with it."""
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise ApiError(f"the body must be JSON, sent as Content-Type: application/json, not {content_type[:80]!r}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {_short(error)}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not {type(value).__name__}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _invalid(error) from None


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates, which it cannot have, become question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def _invalid(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in found[:_MOST_ERRORS]]
    if len(found) > _MOST_ERRORS:
        texts.append(f"and {len(found) - _MOST_ERRORS} more")
    param = str(found[0]["loc"][0]) if found[0]["loc"] else None
    return ApiError("; ".join(map(_short, texts)), param=None if param is None else _short(param))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
