"""Text to tokens and back: the tokenizer of the model's folder, or bytes where there is none.

Detokenisation is incremental: what is given out piece by piece is the text of all tokens together, and a character
whose bytes come in several tokens is given out once it is whole.  As in vLLM it goes on where the prompt ends: with
tokenizers whose first token loses its space, the first token of an answer keeps it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_LONGEST_CHARACTER_TOKENS = 8
"""Tokens that may spell one character (4 bytes in UTF-8, and something to spare); more are no valid text."""
_MOST_SILENT_TOKENS = 64
"""Tokens without a text of their own that are kept because those behind them may be read differently without them."""
_BROKEN = "\ufffd"
_PRINTABLE = tuple(range(32, 127))


class Detokenizer(Protocol):
    """Turns one answer into text, piece by piece."""

    def add(self, token_id: int) -> str:
        """The text that is certain now; often that of this token."""

    def end(self) -> str:
        """The text that was held back for tokens that never came."""


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    vocab_size: int
    has_real_vocabulary: bool
    """Whether it is the model's own."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer to that prompt."""

    def filler_ids(self) -> list[int]:
        """Ids that a made-up answer may consist of: neither special nor ending an answer."""


class ByteTokenizer:
    """A token is a byte of UTF-8, for models that come without a tokenizer.

    The rule for a vocabulary of V ids: byte b is token b; where V is below 256 it is b modulo V, which loses what does
    not fit.  Tokens that are no bytes (from 256 on, and all of them where V is below 256) stand for the printable ASCII
    characters in turn, so that whatever a model samples reads as text.  Ids in ``silent_ids`` (such as the end of an
    answer) have none.
    """

    has_real_vocabulary = False

    def __init__(self, vocab_size: int, silent_ids: Sequence[int] = ()) -> None:
        """Raises ValueError for an empty vocabulary."""
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self._silent = frozenset(silent_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 -- it has none
        """The bytes of the text; lone surrogates, which have none, become question marks."""
        data = text.encode("utf-8", errors="replace")
        return list(data) if self.vocab_size >= 256 else [byte % self.vocab_size for byte in data]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens; what is no valid UTF-8 becomes the replacement character."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for."""
        if token_id in self._silent:
            return b""
        if self.vocab_size >= 256 and token_id < 256:
            return bytes((token_id,))
        return bytes((_PRINTABLE[token_id % len(_PRINTABLE)],))

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),  # noqa: ARG002 -- a byte means the same wherever it stands
        *,
        skip_special_tokens: bool = True,  # noqa: ARG002 -- those that are silent here have no text at all
    ) -> Detokenizer:
        """For one answer to that prompt."""
        return _ByteDetokenizer(self)

    def filler_ids(self) -> list[int]:
        """Ids of small letters and spaces; of whatever there is in a vocabulary without them."""
        silent, legible = self._silent, b" abcdefghijklmnopqrstuvwxyz"
        ids = [i for i in range(min(self.vocab_size, 256)) if i not in silent and self.bytes_of(i) in legible]
        return ids or [i for i in range(self.vocab_size) if i not in silent] or [0]


class _ByteDetokenizer:
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class FileTokenizer:
    """The ``tokenizer.json`` of a model's folder, by the ``tokenizers`` package."""

    has_real_vocabulary = True

    def __init__(self, path: Path, vocab_size: int | None = None) -> None:
        """``vocab_size`` is the model's, which may be larger; tokens beyond the tokenizer's have no text.

        Raises ValueError if the file is none that ``tokenizers`` can read.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing more special
            raise ValueError(f"{path}: tokenizers cannot read it ({error}): is it a tokenizer.json?") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._num_known: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocab_size = self._num_known if vocab_size is None else vocab_size
        self._special = {
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; lone surrogates, which have none, become question marks."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._tokenizer.encode(clean, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens, special ones left out unless told otherwise."""
        known = [token_id for token_id in token_ids if token_id < self._num_known]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether a token takes part in decoding at all."""
        return token_id < self._num_known and not (skip_special_tokens and token_id in self._special)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer to that prompt."""
        return _WindowDetokenizer(self, prompt_token_ids, skip_special_tokens)

    def filler_ids(self) -> list[int]:
        """All that are not special and that the model has, too."""
        return [i for i in range(min(self._num_known, self.vocab_size)) if i not in self._special] or [0]


class _WindowDetokenizer:
    """Decodes a short window of tokens twice: with and without the newest; the difference is new text.

    The window begins a little before what was given out, because a token's text can depend on the one before it, and
    with the end of the prompt at first.
    """

    def __init__(self, tokenizer: FileTokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._given = self._end_of(prompt_token_ids)
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skips_special):
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self._held) < _LONGEST_CHARACTER_TOKENS:
            return ""
        # One without a text, such as a space that is stripped from the front, still is what the next one stands behind.
        self._given = self._held if text else (self._given + self._held)[-_MOST_SILENT_TOKENS:]
        self._held = []
        return text

    def end(self) -> str:
        return self._new_text() if self._held else ""

    def _new_text(self) -> str:
        before, after = self._decode(self._given), self._decode(self._given + self._held)
        return after[len(before) :] if after.startswith(before) else self._decode(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skips_special)

    def _end_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that are whole characters; none if there are no such."""
        end: list[int] = []
        text = ""
        for token_id in reversed(prompt_token_ids[-_MOST_SILENT_TOKENS:]):
            if self._tokenizer.has_text(token_id, self._skips_special):
                end.insert(0, token_id)
                text = self._decode(end)
                if text and _BROKEN not in text:
                    return end
                if len(end) == _LONGEST_CHARACTER_TOKENS:
                    break
        return [] if text else end  # which is nothing but broken characters, or has no text at all


def load_tokenizer(folder: Path | None, vocab_size: int, silent_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of the folder if it has a ``tokenizer.json``, else bytes.

    Raises ValueError for a file that cannot be read, ImportError without the package that reads it.
    """
    if folder is not None and (folder / "tokenizer.json").is_file():
        return FileTokenizer(folder / "tokenizer.json", vocab_size)
    return ByteTokenizer(vocab_size, silent_ids)


class ChatTemplate:
    """Turns the messages of a chat into a prompt: the folder's own template, or a plain one for the byte tokenizer.

    The plain one is a line ``role: content`` for each message and ``assistant:`` at the end.
    """

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        """Raises ValueError for a template that is not valid."""
        self._special_tokens = special_tokens
        self._template = None if source is None else _compiled(source)

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt.  Raises ValueError where the template refuses the messages."""
        if self._template is None:
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)
        variables = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            return str(
                self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
            )
        except Exception as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from error


def load_chat_template(folder: Path | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The folder's template; None for a real tokenizer that comes without one (vLLM then refuses to chat).

    It is ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``.  Raises ValueError for one that
    is not valid.
    """
    config = _tokenizer_config(folder)
    source = _template_source(folder, config)
    if source is None:
        return None if tokenizer.has_real_vocabulary else ChatTemplate(None, {})
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return ChatTemplate(source, {name: _token_text(config[name]) for name in names if config.get(name)})


def _tokenizer_config(folder: Path | None) -> dict[str, Any]:
    path = folder / "tokenizer_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    return config if isinstance(config, dict) else {}


def _template_source(folder: Path | None, config: dict[str, Any]) -> str | None:
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _compiled(source: str) -> Any:
    """As Hugging Face compiles templates: sandboxed, blocks trimmed, loop controls and a few helpers at hand."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is not valid: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _strftime_now(text: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(text)
