"""A model's batching settings from a Triton ``config.pbtxt``.

The file is protobuf text format; the reader here knows the language but not the schema, so it needs no protobuf.
Source of the language: protobuf's "Text Format Language Specification"; of the fields: Triton's
``model_config.proto``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.dynamic import DynamicConfig

TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?))
      | (?P<name>[A-Za-z_]\w*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<mark>[][{}<>:,;./])""",
    re.VERBOSE,
)
CLOSING = {"{": "}", "<": ">"}
BATCHING_FIELDS = (
    "preferred_batch_size",
    "max_queue_delay_microseconds",
    "default_queue_policy",
    "priority_levels",
    "default_priority_level",
    "priority_queue_policy",
)
_MODEL_FIELDS = [
    "name",
    "platform",
    "backend",
    "runtime",
    "version_policy",
    "max_batch_size",
    "input",
    "output",
    "batch_input",
    "batch_output",
    "optimization",
    "dynamic_batching",
    "sequence_batching",
    "ensemble_scheduling",
    "instance_group",
    "default_model_filename",
    "cc_model_filenames",
    "metric_tags",
    "parameters",
    "model_warmup",
    "model_operations",
    "model_transaction_policy",
    "model_repository_agents",
    "response_cache",
    "model_metrics",
]
_BATCHING_FIELDS = (*BATCHING_FIELDS, "preserve_ordering")
_POLICY_FIELDS = ("max_queue_size", "default_timeout_microseconds", "timeout_action", "allow_timeout_override")
_GROUP_FIELDS = [
    "name",
    "kind",
    "count",
    "rate_limiter",
    "gpus",
    "secondary_devices",
    "profile",
    "passive",
    "host_policy",
]
MAX_DELAY_US = 10**15
"""Longer waits (31 years) are for ever."""
MAX_NUMBER = {"priority_levels": 10_000, "default_priority_level": 10_000, "max_batch_size": 1_000_000, "count": 10_000}
MAX_DEPTH = 100
"""Of messages within messages; protobuf's own limit."""
TIMEOUT_ACTION_NUMBERS = {"0": "REJECT", "1": "DELAY"}


class PbtxtError(ValueError):
    """A ``config.pbtxt`` that cannot be read or says what Triton would refuse; the message names the line."""


class Imported(NamedTuple):
    """What came out of a ``config.pbtxt``."""

    config: DynamicConfig
    ignored: tuple[str, ...]
    """Fields that play no part in the simulation, with their line, in the order of the file, and what was assumed."""


def from_pbtxt(text: str) -> Imported:
    """Read max_batch_size, dynamic_batching and the instances' count; all other fields are ignored and listed.

    Without ``dynamic_batching`` Triton runs requests one by one, and so does the config that comes out.  Instances of
    several groups or GPUs are counted as if they stood on one.

    Raises PbtxtError, naming the line, for a syntax error, a value of the wrong kind, a field given twice, and for
    ``sequence_batching``, which is another scheduler.
    """
    reader = _Reader(_Message(1, _Parser(text).parse()))
    return reader.imported()


# -- the language


class _Scalar(NamedTuple):
    kind: str
    text: str
    line: int


class _Message(NamedTuple):
    line: int
    fields: list[tuple[str, _Scalar | _Message]]


class _Parser:
    """Text to nested fields, in order; the schema is the reader's business."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._depth = 0

    def parse(self) -> list[tuple[str, _Scalar | _Message]]:
        """All fields of the file."""
        return self._fields(end="")

    def _fields(self, end: str) -> list[tuple[str, _Scalar | _Message]]:
        fields: list[tuple[str, _Scalar | _Message]] = []
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PbtxtError(f"line {self._peek().line}: messages are nested more than {MAX_DEPTH} deep")
        while (token := self._take()).text != end or token.kind == "string":
            if token.kind != "name":
                raise _unexpected(token, f"a field's name or {end!r}" if end else "a field's name")
            fields += [(token.text, value) for value in self._values()]
            if self._peek().text in (",", ";"):
                self._take()
        self._depth -= 1
        return fields

    def _values(self) -> list[_Scalar | _Message]:
        """What follows a field's name: one value or a list of them."""
        has_colon = self._skip(":")
        if not self._skip("["):
            return [self._value(has_colon)]
        values: list[_Scalar | _Message] = []
        while not self._skip("]"):
            if values and not self._skip(","):
                raise _unexpected(self._peek(), "',' or ']'")
            values.append(self._value(may_be_scalar=True))
        return values

    def _value(self, may_be_scalar: bool) -> _Scalar | _Message:
        token = self._take()
        if token.kind == "mark" and token.text in CLOSING:
            return _Message(token.line, self._fields(CLOSING[token.text]))
        if not may_be_scalar:
            raise _unexpected(token, "':' or '{'")
        if token.kind not in ("number", "name", "string"):
            raise _unexpected(token, "a value")
        while token.kind == "string" and self._peek().kind == "string":
            self._take()  # adjacent strings are one; no field that is read holds one
        return token

    def _skip(self, mark: str) -> bool:
        found = self._peek().kind == "mark" and self._peek().text == mark
        self._at += found
        return found

    def _peek(self) -> _Scalar:
        return self._tokens[self._at]

    def _take(self) -> _Scalar:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token


def _tokens(text: str) -> Iterator[_Scalar]:
    at, line = 0, 1
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise PbtxtError(f"line {line}: cannot read {text[at : at + 20].splitlines()[0]!r}")
        if found.lastgroup and found.lastgroup != "space":
            yield _Scalar(found.lastgroup, found.group(), line)
        line += found.group().count("\n")
        at = found.end()
    yield _Scalar("end", "", line)


def _unexpected(token: _Scalar, wanted: str) -> PbtxtError:
    return PbtxtError(f"line {token.line}: expected {wanted}, found {token.text or 'the end of the file'!r}")


# -- the fields


class _Reader:
    """Takes the fields that matter and notes the others."""

    def __init__(self, model: _Message) -> None:
        self._model = model
        self._ignored: dict[tuple[int, str], None] = {}

    def imported(self) -> Imported:
        model = self._model
        self._check_names(model, _MODEL_FIELDS, "a model")
        for line in self._lines(model, "sequence_batching"):
            raise PbtxtError(f"line {line}: sequence_batching is not simulated: import models with dynamic_batching")
        max_batch_size = self._int(model, "max_batch_size")
        batching = self._message(model, "dynamic_batching")
        if batching is None:
            self._note(model.line, "no dynamic_batching: requests run one by one")
        elif not max_batch_size:
            self._note(model.line, "max_batch_size is 0: requests run one by one")
        num_instances = self._num_instances(model)
        self._tell_of_in_flight_batching(model)
        self._rest(model, "", ("max_batch_size", "dynamic_batching", "instance_group"))
        config = self._config(batching, max_batch_size, num_instances)
        ignored = tuple(f"line {line}: {what}" for line, what in sorted(self._ignored))
        return Imported(config, ignored)

    def _config(self, batching: _Message | None, max_batch_size: int, num_instances: int) -> DynamicConfig:
        if batching is not None:
            self._check_names(batching, _BATCHING_FIELDS, "dynamic_batching")
        if batching is None or not max_batch_size:
            return DynamicConfig(1, instance_count=num_instances)
        sizes = [self._number(value, "preferred_batch_size") for value in self._all(batching, "preferred_batch_size")]
        delay_us = self._int(batching, "max_queue_delay_microseconds")
        policy = self._policy(batching, "default_queue_policy", "default_queue_policy")
        num_levels = self._int(batching, "priority_levels")
        default_level = self._int(batching, "default_priority_level")
        policies = [
            (self._int(entry, "key"), self._policy(entry, "value", "priority_queue_policy"))
            for entry in self._messages(batching, "priority_queue_policy")
        ]
        self._rest(batching, "dynamic_batching.", BATCHING_FIELDS)
        try:
            return DynamicConfig(
                max_batch_size,
                tuple(sizes),
                delay_us,
                policy,
                num_levels,
                default_level,
                tuple(policies),
                num_instances,
            )
        except ValueError as error:
            raise PbtxtError(f"line {batching.line}: dynamic_batching: {error}") from None

    def _policy(self, parent: _Message, field: str, name: str) -> QueuePolicy:
        policy = self._message(parent, field)
        if policy is None:
            return QueuePolicy()
        self._check_names(policy, _POLICY_FIELDS, name)
        size, timeout_us = self._int(policy, "max_queue_size"), self._int(policy, "default_timeout_microseconds")
        action = self._one(policy, "timeout_action")
        word = action.text if isinstance(action, _Scalar) else "REJECT" if action is None else "a message"
        self._rest(
            policy, f"dynamic_batching.{name}.", ("max_queue_size", "default_timeout_microseconds", "timeout_action")
        )
        try:
            return QueuePolicy(size, timeout_us, TIMEOUT_ACTION_NUMBERS.get(word, word))
        except ValueError as error:
            raise PbtxtError(f"line {policy.line}: {name}: {error}") from None

    def _num_instances(self, model: _Message) -> int:
        total = 0
        for group in self._messages(model, "instance_group"):
            self._check_names(group, _GROUP_FIELDS, "instance_group")
            total += self._int(group, "count") or 1
            self._rest(group, "instance_group.", ("count",))
        return total or 1

    def _tell_of_in_flight_batching(self, model: _Message) -> None:
        """TensorRT-LLM's own scheduler is no dynamic batching, whatever the rest of the file says."""
        for entry in self._messages(model, "parameters"):
            key, value = self._one(entry, "key"), self._message(entry, "value")
            word = self._one(value, "string_value") if value else None
            if _unquoted(key) == "gpt_model_type" and "inflight" in _unquoted(word):
                self._note(
                    entry.line,
                    "parameters: gpt_model_type says in-flight batching, which is continuous batching: simulate that "
                    "with --batching continuous",
                )

    def _check_names(self, message: _Message, known: Sequence[str], where: str) -> None:
        """Refuse, as Triton does, a field that there is not."""
        for name, value in message.fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise PbtxtError(f"line {value.line}: unknown field {name!r} of {where}{hint}")

    def _rest(self, message: _Message, prefix: str, known: tuple[str, ...]) -> None:
        for name, value in message.fields:
            if name not in known:
                self._note(value.line, prefix + name)

    def _note(self, line: int, what: str) -> None:
        self._ignored[line, what] = None  # a list of values is one field

    def _all(self, message: _Message, name: str) -> list[_Scalar | _Message]:
        return [value for field, value in message.fields if field == name]

    def _lines(self, message: _Message, name: str) -> list[int]:
        return [value.line for value in self._all(message, name)]

    def _one(self, message: _Message, name: str) -> _Scalar | _Message | None:
        values = self._all(message, name)
        if len(values) > 1:
            raise PbtxtError(f"line {values[1].line}: {name} is given twice")
        return values[0] if values else None

    def _messages(self, message: _Message, name: str) -> list[_Message]:
        values = self._all(message, name)
        for value in values:
            if isinstance(value, _Scalar):
                raise PbtxtError(f"line {value.line}: {name} must be a message in braces, found {value.text!r}")
        return [value for value in values if isinstance(value, _Message)]

    def _message(self, message: _Message, name: str) -> _Message | None:
        self._one(message, name)
        return next(iter(self._messages(message, name)), None)

    def _int(self, message: _Message, name: str) -> int:
        value = self._one(message, name)
        return 0 if value is None else self._number(value, name)

    def _checked(self, number: int, line: int, name: str) -> int:
        """Delays are cut to what is for ever; of everything else no more is believed than Triton's own limit."""
        if name.endswith("_microseconds"):
            return min(number, MAX_DELAY_US)
        if number > MAX_NUMBER.get(name, 2**31 - 1):
            raise PbtxtError(f"line {line}: {name} must be at most {MAX_NUMBER.get(name, 2**31 - 1):,}, got {number}")
        return number

    def _number(self, value: _Scalar | _Message, name: str) -> int:
        found = value.text if isinstance(value, _Scalar) else "a message"
        if isinstance(value, _Scalar) and value.kind == "number":
            try:
                number = int(found[:40], 0)
            except ValueError:
                pass
            else:
                return self._checked(number, value.line, name)
        found = found if len(found) <= 40 else f"{found[:37]}..."
        raise PbtxtError(f"line {value.line}: {name} must be a whole number, found {found!r}")


def _unquoted(value: _Scalar | _Message | None) -> str:
    return value.text.strip("\"'") if isinstance(value, _Scalar) else ""
