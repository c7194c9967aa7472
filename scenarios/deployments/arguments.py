"""Arguments of ``vllm serve``, read as vLLM's own parser reads them.

Source: ``FlexibleArgumentParser`` in ``vllm/utils/argparse_utils.py`` (0.32.0) and Python's argparse under it:
underscores for dashes, abbreviations, ``--flag=value``, ``--no-flag``, ``-O3``, dotted JSON (``--hf-overrides.a.b 1``,
``--list+ x,y``), ``--config FILE`` in front of all flags, and of two equal flags the later one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.scenarios.deployments.options import Match, Option, find, is_option_like, options, with_dashes
from windtunnel.scenarios.deployments.reading import Reading
from windtunnel.scenarios.deployments.settings import SETTINGS, SPECULATIVE_KEYS, complaint, from_text
from windtunnel.scenarios.deployments.words import Word
from windtunnel.scenarios.deployments.yaml_tree import Tree, read_yaml_file

SERVE = "serve"
"""``vllm serve``: the first word that is no flag is the model."""
API_SERVER = "api_server"
"""``python -m vllm.entrypoints.openai.api_server``: the model comes by --model."""
_TRUTH = {"true": True, "false": False}


class _Given(NamedTuple):
    """An option with its value words, in order of appearance."""

    option: Option
    match: Match
    words: tuple[Word, ...]
    source: str
    written: str


def read_arguments(words: Sequence[Word], reading: Reading, program: str, base_dir: Path) -> None:
    """Read what follows ``vllm serve``; relative ``--config`` paths start at ``base_dir``.

    Raises DeploymentError for a value of the wrong type or out of range, for a flag without its value, and for a quote
    that is never closed.
    """
    for word in words:
        if word.unclosed is not None:
            raise word.unclosed.complaint()
    _Arguments(reading, program, base_dir).read(_apart(words, reading))


def config_words(tree: Tree, reading: Reading, program: str) -> list[Word]:
    """The arguments that vLLM makes of a config file (``load_config_file``), each with its line.

    ``false`` makes none under ``vllm serve``: the parser that reads the file is not the one that knows the flags.
    Under the module entry point it makes ``--no-key`` where the key is spelled with dashes and has that form.
    """
    words: list[Word] = []
    for key, item in tree.items():
        flag = Word(f"--{key}", item.source)
        if isinstance(item.value, bool):
            words += _config_switch(flag, item, reading, program)
        elif isinstance(item.value, list):
            texts = [str(entry.value) for entry in item.entries()]
            words += [flag, *(Word(text, item.source) for text in texts)] if texts else []
        else:
            text = json.dumps(item.value) if isinstance(item.value, dict) else str(item.value)
            words += [flag, Word(text, item.source)]
    return words


def _config_switch(flag: Word, item: Tree, reading: Reading, program: str) -> list[Word]:
    if item.value:
        return [flag]
    negated = f"--no-{flag.text[2:]}"
    if program == API_SERVER and "_" not in negated and find(negated).negated:
        return [Word(negated, flag.source)]
    option = find(with_dashes(flag.text)).option
    if option is None:
        reading.refuse_unknown(flag.text, flag.source)
    elif option.key not in SETTINGS or SETTINGS[option.key].default is False:
        reading.ignore(option)
    else:
        reading.note(
            f"{item.source}: {flag.text[2:]}: false has no effect, vLLM's config file can only switch on: "
            f"write --no-{option.name} on the command line"
        )
    return []


def _apart(words: Iterable[Word], reading: Reading) -> list[Word]:
    """Take apart a flag and its value that stand in one argument, which vLLM refuses, and say so."""
    found: list[Word] = []
    for word in words:
        flag, space, value = word.text.partition(" ")
        if space and flag.startswith("--") and "=" not in flag and find(with_dashes(flag)).option is not None:
            reading.refusal(f"{_place(word)}{word.text!r} is one argument; vLLM refuses it: make flag and value two")
            found += [word._replace(text=flag), word._replace(text=value.strip())]
        else:
            found.append(word)
    return found


class _Arguments:
    def __init__(self, reading: Reading, program: str, base_dir: Path) -> None:
        self.reading = reading
        self.program = program
        self.base_dir = base_dir
        self.dotted: dict[str, tuple[dict[str, Any], Word]] = {}

    def read(self, words: list[Word]) -> None:
        self._note_model_behind_its_names(words)
        config, words = self._config(words)
        self._take(self._without_dotted(config))
        models = self._take(self._without_dotted(words))
        self._take_dotted()
        self._take_model(models)

    def _note_model_behind_its_names(self, words: list[Word]) -> None:
        """vLLM refuses --served-model-name where the model does not come first."""
        flags = {with_dashes(word.text).partition("=")[0] for word in words}
        names_it = bool(flags & {"--model", "--config"})
        begins_with_flag = self.program == SERVE and bool(words) and words[0].text.startswith("-")
        if begins_with_flag and not names_it and "--served-model-name" in flags:
            self.reading.refusal(
                f"{_place(words[0])}vLLM refuses --served-model-name unless the model comes first: put it there"
            )

    def _config(self, words: list[Word]) -> tuple[list[Word], list[Word]]:
        """The words of the config file, and those of the command line without it."""
        for word in words:
            if word.text.startswith("--config="):
                self.reading.note(
                    f"{_place(word)}vLLM reads no config file that is given as {word.text}: "
                    "write --config and the file as two words"
                )
        words = [word for word in words if not word.text.startswith("--config=")]
        at = next((at for at, word in enumerate(words) if word.text == "--config"), None)
        if at is None:
            return [], words
        if at + 1 == len(words):
            raise complaint(words[at].source, "--config", "", "needs the path of a YAML file")
        return self._config_file(words[at + 1]), words[:at] + words[at + 2 :]

    def _config_file(self, word: Word) -> list[Word]:
        path = self.base_dir / word.text
        if word.unresolved or not path.is_file():
            self.reading.note(
                f"{_place(word)}the config file {word.text} is not here; what it sets is missing: read it on its own"
            )
            return []
        return config_words(read_yaml_file(path), self.reading, self.program)

    def _without_dotted(self, words: list[Word]) -> list[Word]:
        """Collect dotted keys and take them out, which vLLM does before anything else."""
        rest: list[Word] = []
        at = 0
        while at < len(words):
            if self._is_dotted(words[at].text):
                at += self._dot(words, at)
            else:
                rest.append(words[at])
                at += 1
        return rest

    def _take(self, words: list[Word]) -> list[Word]:
        """Give all options among the words to the reading; returns the words that are none."""
        loose: list[Word] = []
        at = 0
        while at < len(words):
            word = words[at]
            if not self._is_flag(word):
                loose.append(word)
                at += 1
            else:
                at += self._option(words, at, swallows=self.program != SERVE or bool(loose))
        return loose

    def _is_flag(self, word: Word) -> bool:
        if word.unresolved and word.text.startswith("$"):
            return False
        return is_option_like(word.text) or word.text.startswith("-O")

    def _is_dotted(self, text: str) -> bool:
        return text.startswith("-") and "." in text.partition("=")[0]

    def _dot(self, words: list[Word], at: int) -> int:
        """Collect ``--flag.key value``; returns the number of words it took."""
        name, equals, text = with_dashes(words[at].text).partition("=")
        value = Word(text, words[at].source)
        if not equals:
            if at + 1 == len(words):
                raise complaint(words[at].source, words[at].text, "", "needs a value")
            value = words[at + 1]
        flag, *keys = name.removesuffix("+").split(".")
        if value.unresolved:
            self.reading.unresolved(value.unresolved, words[at].text, words[at].source)
        elif find(flag).option is None:
            self.reading.refuse_unknown(flag, words[at].source)
        else:
            table, _ = self.dotted.setdefault(flag, ({}, words[at]))
            _merge(table, _nested(keys, _json_value(value.text, name.endswith("+"))))
        return 1 if equals else 2

    def _option(self, words: list[Word], at: int, swallows: bool) -> int:
        """Give the option at this word; returns the number of words it took.

        The word behind an unknown flag is its value if ``swallows``; else it may be the model.
        """
        word = words[at]
        match = self._spelled(word.text)
        if match.option is None:
            self.reading.refuse_unknown(word.text.partition("=")[0], word.source, match.candidates)
            has_value = "=" not in word.text and at + 1 < len(words) and not self._is_flag(words[at + 1])
            return 2 if has_value and swallows else 1
        taken = self._values(word, match, words[at + 1 :])
        self._give(_Given(match.option, match, tuple(taken), word.source, word.text.partition("=")[0]))
        return 1 + (len(taken) if match.value is None else 0)

    def _spelled(self, text: str) -> Match:
        if text.startswith("-O"):  # -O3, -O=3, -O 3
            return Match(options()["optimization-level"], text[2:].removeprefix("=") or None)
        return find(with_dashes(text))

    def _values(self, word: Word, match: Match, following: list[Word]) -> list[Word]:
        """The option's values: what stands in its own word, or words among the following."""
        assert match.option is not None
        if match.value is not None:
            return [word._replace(text=match.value)]
        most = {"value": 1, "optional_value": 1, "list": len(following)}.get(match.option.kind, 0)
        if not match.option.takes_values and following and following[0].text.lower() in _TRUTH:
            most = 1
        taken: list[Word] = []
        for word in following[:most]:
            if self._is_flag(word):
                break
            taken.append(word)
        return taken

    def _give(self, given: _Given) -> None:
        option, words = given.option, given.words
        unresolved = tuple(name for word in words for name in word.unresolved)
        if option.key not in SETTINGS and option.key not in SPECULATIVE_KEYS:
            self.reading.tell_pooling(option, words[0].text if words and not unresolved else None)
            self.reading.ignore(option)
            self._note_switch(given)
        elif unresolved:
            self.reading.options[option.name] = option
            self.reading.unresolved(unresolved, given.written, given.source)
        elif not option.takes_values:
            self.reading.give(option, self._switch(given), given.source, given.written)
        elif option.kind == "optional_value" and not words:
            self.reading.give(option, True, given.source, given.written)
        elif not words:
            raise complaint(given.source, given.written, "", "needs a value")
        else:
            values = [from_text(option, word.text, given.source, given.written) for word in words]
            self.reading.give(option, values if option.kind == "list" else values[0], given.source, given.written)

    def _switch(self, given: _Given) -> bool:
        if not given.words:
            return not given.match.negated
        self._note_switch(given)
        return _TRUTH[given.words[0].text.lower()] is not given.match.negated

    def _note_switch(self, given: _Given) -> None:
        """Say that a switch takes no value, where it takes none."""
        option = given.option
        if option.takes_values or not given.words:
            return
        text = given.words[0].text
        if text.lower() not in _TRUTH:
            raise complaint(given.source, given.written, text, "takes no value: write the flag alone, or with --no-")
        release = self.reading.release
        if release and option.kind_in(release) == "boolean_value":
            return
        value = _TRUTH[text.lower()] is not given.match.negated
        right = option.flag if value else f"--no-{option.name}"
        since = " since 0.8.5" if any(kind == "boolean_value" for _, kind in option.spelling) else ""
        self.reading.refusal(f"{_place(given)}vLLM refuses a value for {given.written}{since}: write {right}")

    def _take_dotted(self) -> None:
        """Dotted keys come last, as vLLM puts them behind all other arguments."""
        for flag, (table, word) in self.dotted.items():
            option = find(flag).option
            assert option is not None
            value = from_text(option, json.dumps(table), word.source, flag)
            self.reading.give(option, value, word.source, flag)

    def _take_model(self, loose: list[Word]) -> None:
        """The first loose word is the model; it beats --model from a config file."""
        for at, word in enumerate(loose):
            if at == 0 and self.program == SERVE:
                self._positional_model(word)
            elif word.unresolved:
                self.reading.unresolved(word.unresolved, word.text, word.source)
            else:
                self.reading.refuse_unknown(word.text, word.source)

    def _positional_model(self, word: Word) -> None:
        if word.unresolved:
            self.reading.unresolved(word.unresolved, f"the model {word.text}", word.source)
            return
        self.reading.set("model", word.text, word.source, "model")


def _place(item: Word | _Given) -> str:
    return f"{item.source}: " if item.source else ""


def _nested(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(table: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        old = table.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            table[key] = old + value
        else:
            table[key] = value


def _json_value(text: str, is_list: bool) -> Any:
    """A value behind a dotted key: JSON if it is, else a number with a suffix, else text."""
    text = json.dumps(text.split(",")) if is_list else text
    try:
        return json.loads(text)
    except ValueError:
        pass
    count = options()["max-num-batched-tokens"]
    try:
        return from_text(count._replace(key=""), text, "", "")
    except ValueError:
        return text
