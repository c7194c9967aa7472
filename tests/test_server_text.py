"""Text to tokens and back, stop strings and chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import limits, serving

from windtunnel.executor.filler import Filler
from windtunnel.executor.server.generation import AnswerText, Stops
from windtunnel.executor.server.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_chat_template,
    load_tokenizer,
)

TEXT = "Grüße, 世界 🌍! The quick brown fox; naïve café – 日本語."


# -- bytes as tokens


def test_characters_are_given_out_whole() -> None:
    tokenizer = ByteTokenizer(1000)
    text = TEXT
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.end() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("vocab_size", [1, 40, 256, 300, 128_256])
def test_a_byte_tokenizer_fits_any_vocabulary(vocab_size: int) -> None:
    tokenizer = ByteTokenizer(vocab_size, silent_ids=[0])
    assert max(tokenizer.encode("é and \ud800 z")) < vocab_size
    assert tokenizer.decode([0]) == ""
    assert all(0 <= token < vocab_size for token in tokenizer.filler_ids())
    if vocab_size >= 256:
        assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
    assert len(tokenizer.decode(range(256, min(vocab_size, 600)))) == max(0, min(vocab_size, 600) - 256)


# -- the tokenizer of a folder


def make_tokenizer(folder: Path, kind: str) -> FileTokenizer:
    """A tokenizer.json of each kind that matters: bytes joined to tokens, and bytes only where words are missing."""
    from tokenizers import Tokenizer as Made
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if kind == "byte level":
        made = Made(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
        )
        made.train_from_iterator(["The quick brown fox Grüße naïve"] * 3, trainer)
    else:
        words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁The", "▁quick", "qu", "ick", "é"]
        made = Made(
            models.BPE(
                {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
            )
        )
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        made.add_special_tokens(["<s>", "</s>"])
    if kind == "metaspace":
        words = ["<unk>", "▁", "▁a", "b", "▁b", "c", "▁▁", "<s>", "</s>"]
        made = Made(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        made.decoder = decoders.Metaspace()
    elif kind == "word piece":
        words = ["[UNK]", "hello", "##lo", "##s", ".", "don", "'", "t", "##", "[CLS]", "[SEP]"]
        made = Made(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        made.decoder = decoders.WordPiece()
    if kind in KINDS[2:]:
        made.add_special_tokens(words[-2:])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder, 400)
    assert isinstance(loaded, FileTokenizer)
    return loaded


KINDS = ("byte level", "byte fallback", "metaspace", "word piece")


@pytest.fixture(scope="module", params=KINDS[:2])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], prompt: Sequence[int] = (), **options: Any) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, **options)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.end()]


def test_a_folders_tokenizer_gives_text_in_whole_characters(tokenizer: FileTokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileTokenizer]:
    return {kind: make_tokenizer(tmp_path_factory.mktemp("tokenizer"), kind) for kind in KINDS}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_are_the_text_of_all_tokens_together(
    tokenizers: dict[str, FileTokenizer], kind: str, skip: bool, data: st.DataObject
) -> None:
    """Where they are valid text; how much of the others is broken depends on what comes together."""
    tokenizer = tokenizers[kind]
    few = st.integers(0, 8) if kind in KINDS[2:] else st.sampled_from([1, 2, *range(259, 266)])
    token_ids = data.draw(st.lists(few | st.integers(0, 275), max_size=25))
    num_prompt_tokens = data.draw(st.integers(0, len(token_ids)))
    whole = tokenizer.decode(token_ids, skip)
    prompt, answer = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    before = tokenizer.decode(prompt, skip)
    if "\ufffd" in whole or "\ufffd" in before:
        return
    assert before + "".join(pieces_of(tokenizer, answer, prompt, skip_special_tokens=skip)) == whole


@pytest.mark.parametrize("kind", ["byte fallback", "metaspace"])
def test_an_answer_keeps_the_spaces_at_its_front(tokenizers: dict[str, FileTokenizer], kind: str) -> None:
    """The tokenizer strips one from the front of a text, which an answer is not."""
    tokenizer = tokenizers[kind]
    space, word = (259, 260) if kind == "byte fallback" else (1, 2)
    text = tokenizer.decode([word])
    assert text == tokenizer.decode([word]).strip(), "stripped"
    assert pieces_of(tokenizer, [space, word]) == ["", f" {text}", ""], "without a prompt the first space is stripped"
    assert pieces_of(tokenizer, [word], prompt=[word]) == [f" {text}", ""]
    assert pieces_of(tokenizer, [space, word], prompt=[word]) == [" ", f" {text}", ""]
    assert pieces_of(tokenizer, [space, word], prompt=[space]) == [" ", f" {text}", ""], "stripped from the prompt"


def test_an_answer_to_a_prompt_that_ends_in_bytes_is_whole(tokenizers: dict[str, FileTokenizer]) -> None:
    tokenizer = tokenizers["byte fallback"]
    as_bytes = [[3 + byte for byte in text.encode()] for text in ("世界", "日本")]
    assert "".join(pieces_of(tokenizer, as_bytes[1], prompt=as_bytes[0])) == "日本"


def test_special_tokens_have_a_text_on_request(tokenizers: dict[str, FileTokenizer]) -> None:
    tokenizer = tokenizers["byte fallback"]
    assert "".join(pieces_of(tokenizer, [263, 2, 263], skip_special_tokens=False)) == "ick</s>ick"
    assert "".join(pieces_of(tokenizer, [263, 2, 263])) == "ickick"
    first, second = (3 + byte for byte in "é".encode())
    assert pieces_of(tokenizer, [first, *[2] * 20, second])[-2:] == ["é", ""], "they do not come between"


def test_a_request_may_ask_for_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "byte level")
    with serving(limits(), config={"vocab_size": 400}, folder=tmp_path) as served:
        served.frontend.loop.engine._filler = Filler([0], seed=0)
        special = tokenizer.decode([0], skip_special_tokens=False)
        assert special in ("<s>", "</s>")
        assert served.complete("a", max_tokens=2)["text"] == ""
        assert served.complete("a", max_tokens=2, skip_special_tokens=False)["text"] == special * 2


def test_made_up_answers_have_no_special_tokens(tokenizer: FileTokenizer) -> None:
    ids = tokenizer.filler_ids()
    assert len(ids) > 200
    assert tokenizer.encode("<s></s>", add_special_tokens=False)[0] not in ids


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: tokenizers cannot read it"):
        load_tokenizer(tmp_path, 400)


# -- stop strings


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_an_answer_ends_at_the_stop_string_that_is_complete_first(text: str, stops: list[str], include: bool) -> None:
    answer = AnswerText(ByteTokenizer(256).detokenizer(), Stops(tuple(stops), include), min_tokens=0)
    pieces, expected, found = [], text, None
    for end in range(1, len(text) + 1):
        endings = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if endings:
            start, found = min(endings)
            expected = text[: end if include else start]
            break
    for letter in text:
        answer.add(ord(letter))
        pieces.append(answer.new())
        if answer.stop is not None:
            break
    else:
        answer.end()
        pieces.append(answer.new())
    assert (answer.stop, "".join(pieces)) == (found, expected)


@pytest.mark.parametrize(("min_tokens", "expected"), [(2, "a"), (3, "aa"), (4, "aaa")])
def test_a_stop_string_counts_from_the_last_of_min_tokens_on(min_tokens: int, expected: str) -> None:
    answer = AnswerText(ByteTokenizer(256).detokenizer(), Stops(("a",)), min_tokens)
    while answer.stop is None:
        answer.add(ord("a"))
    assert answer.new() == expected


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    answer = AnswerText(ByteTokenizer(256).detokenizer(), Stops(("a",)), min_tokens=3)
    for letter in "aabab":
        answer.add(ord(letter))
        if answer.stop is not None:
            break
    assert (answer.new(), answer.stop) == ("aab", "a")


# -- chats


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)


def chat_folder(folder: Path, **config: Any) -> Path:
    make_tokenizer(folder, "byte level")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_the_folders_chat_template_makes_the_prompt(tmp_path: Path, place: str) -> None:
    source: Any = {"config": TEMPLATE, "list": [{"name": "default", "template": TEMPLATE}], "file": "{{ 1 }}"}[place]
    folder = chat_folder(tmp_path, bos_token={"content": "<s>"}, chat_template=source)
    if place == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(limits(), config={"vocab_size": 400}, folder=folder) as served:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
        tokens = served.post("/tokenize", {**body, "chat_template_kwargs": {"mood": "!"}}).json()["tokens"]
        expected = served.post("/tokenize", {"prompt": "<s>[user] Hi\n[assistant]!"}).json()["tokens"]
        assert tokens == expected
        refused = served.post("/v1/chat/completions", {"messages": [{"role": "bad", "content": "x"}]})
        assert refused.status_code == 400
        assert "no such role" in refused.json()["error"]["message"]
        image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
        assert "'text'" in served.post("/v1/chat/completions", image).json()["error"]["message"]


def test_a_template_cannot_reach_outside(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    template = load_chat_template(folder, ByteTokenizer(256))
    assert template is not None
    with pytest.raises(ValueError, match="cannot render"):
        template.render([])


def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    with serving(limits(), config={"vocab_size": 400}, folder=chat_folder(tmp_path)) as served:
        refused = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]


def test_generation_defaults_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [5, 6]}))
    with serving(limits(), config={"vocab_size": 400, "eos_token_id": 5}, folder=tmp_path) as served:
        assert served.frontend.defaults.temperature == 0.5
        assert served.frontend.loop.engine._eos_token_ids == {5, 6}
