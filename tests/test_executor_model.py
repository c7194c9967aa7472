"""The decoder against transformers, its weights, its configs, and the plain operations that it is made of."""

from __future__ import annotations

import json
import struct
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import VOCAB, OneSequence, logits_at_once, tiny_config, tiny_decoder

from windtunnel.executor.batch import Grant, StepBatch
from windtunnel.executor.batch_builder import BatchBuilder
from windtunnel.executor.cache import PagedKvCache, block_bytes
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.model_files import ModelFileError, read_generation_config
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.rope import RopeConfig
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.weights import load_weights, random_weights, tensor_shapes, weights_of
from windtunnel.sim.engine.request import Request

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama without grouped queries": {"num_key_value_heads": 4},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with tied embeddings": {"tie_word_embeddings": True},
    "llama with llama3 rope": {"rope_scaling": LLAMA3},
    "llama with linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama with yarn rope": {"rope_scaling": YARN},
    "llama with a head size of its own": {"head_dim": 24},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 128},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with tied embeddings": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3 with tied embeddings and biases": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}


def transformers_model(overrides: dict[str, Any]) -> Any:
    """A random model of transformers, norms and biases included, so that a missing one shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = deepcopy(tiny_config(**overrides))  # transformers writes into what it is given
    kind = settings.pop("model_type")
    del settings["architectures"]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2))
    return model


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """The same model in transformers and here, by way of a folder."""
    theirs = transformers_model(MODELS[request.param])
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    config = DecoderConfig.from_hf(folder)
    return theirs, Decoder(
        config, load_weights(config, folder), TorchOps(), max_model_len=min(128, config.max_model_len)
    )


def some_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


class SeveralSequences:
    """A view of some sequences with given tokens and blocks."""

    def __init__(self, sequences: list[tuple[list[int], list[int]]]) -> None:
        self.requests = []
        self._tokens = {}
        for i, (tokens, blocks) in enumerate(sequences):
            request = Request(i, 0, len(tokens), 1)
            request.block_ids = blocks
            self.requests.append(request)
            self._tokens[request] = tokens

    def token_ids(self, request: Request) -> list[int]:
        return self._tokens[request]

    def sampling_params(self, request: Request) -> SamplingParams:
        return SamplingParams()


# -- agreement with transformers


def test_logits_of_a_whole_prompt_agree_with_transformers(pair):
    theirs, ours = pair
    tokens = some_tokens(0, 100)
    torch.testing.assert_close(logits_at_once(ours, tokens), their_logits(theirs, tokens), rtol=1e-4, atol=1e-5)


def test_logits_of_mixed_steps_agree_with_transformers(pair):
    """One sequence decodes, one prefills in chunks, one reads the first one's blocks; block ids are in no order."""
    theirs, ours = pair
    first, second = some_tokens(1, 41), some_tokens(2, 60)
    third = [*first[:32], *some_tokens(3, 9)]
    blocks = np.random.default_rng(4).permutation(np.arange(1, 40)).tolist()
    mine = [blocks[:6], blocks[6:14], [*blocks[:4], *blocks[14:16]]]
    view = SeveralSequences(list(zip((first, second, third), mine, strict=True)))
    a, b, c = view.requests
    cache = PagedKvCache(ours.config, 40, 8)
    builder = BatchBuilder(8, 128)
    steps = [
        [(a, 33, 0), (b, 7, 0)],
        [(a, 1, 33), (b, 20, 7), (c, 5, 32)],
        [(a, 1, 34), (c, 1, 37), (b, 32, 27)],
        [(c, 1, 38), (a, 1, 35), (b, 1, 59)],
    ]
    for step in steps:
        host = builder.build([Grant(*grant, samples=True) for grant in step], view)
        with torch.inference_mode():
            logits = ours.forward(host.to_device("cpu"), cache)
        for row, (request, num_tokens, computed) in zip(logits, step, strict=True):
            expected = their_logits(theirs, view.token_ids(request)[: computed + num_tokens])[-1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)


# -- configs


def test_a_config_says_the_same_in_both_ways_of_writing_rope():
    old = DecoderConfig.from_hf(tiny_config(rope_theta=5e5, rope_scaling={**LLAMA3, "type": "llama3"}))
    new = tiny_config(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    del new["rope_theta"]
    assert DecoderConfig.from_hf(new) == old
    assert old.rope.rope_theta == 5e5


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported.*LlamaForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "gpt2 is not supported"),
        ({"architectures": None, "model_type": None}, "a config without architectures is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\) are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "'llama3' lacks low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1, got 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even.*got 15"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number, got 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"intermediate_size": [112]}, r"intermediate_size must be a whole number, got \[112\]"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number above 0, got None"),
        ({"rms_norm_eps": [1e-5]}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, got nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0, got 0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number above 0, got -1e-05"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is too large"),
        ({"rope_theta": [1e4]}, "rope_theta must be a number above 1"),
        ({"rope_theta": {}}, "rope_theta must be a number above 1, got {}"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 1, got nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 1, got inf"),
        ({"rope_theta": 0}, "rope_theta must be a number above 1, got 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 1, got 0"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope scaling .* is not supported"),
        ({"rope_scaling": {**LLAMA3, "factor": [8]}}, r"factor must be a number of at least 1, got \[8\]"),
        ({"rope_scaling": {**YARN, "factor": float("nan")}}, "factor must be a number of at least 1, got nan"),
        ({"rope_scaling": {**YARN, "mscale": {}}}, "mscale must be a number"),
        ({"eos_token_id": {}}, "eos_token_id must be one or several token ids"),
        ({"eos_token_id": [[2]]}, r"eos_token_id must be one or several token ids .*got \[\[2\]\]"),
        ({"eos_token_id": 512}, r"eos_token_id must be .* in \[0, vocab_size = 512\), got 512"),
        ({"eos_token_id": -1}, r"in \[0, vocab_size = 512\), got -1"),
        ({"bos_token_id": "x"}, "bos_token_id must be one or several token ids"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
        ({"quantization_config": [4]}, "quantization_config must be an object"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number, got 'half'"),
        ({"layer_types": 3}, "layer_types must be a list, got 3"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -4},
            "sliding_window must be at least 1, got -4",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_is_not_built_is_refused_by_name(overrides, told):
    with pytest.raises(ValueError, match=told):
        DecoderConfig.from_hf(tiny_config(**overrides))


def test_a_config_is_found_by_file_or_folder_and_faults_name_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert DecoderConfig.from_hf(tmp_path) == DecoderConfig.from_hf(tmp_path / "config.json")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert DecoderConfig.from_hf(str(tmp_path)).eos_token_ids == (2, 7)
    with pytest.raises(ModelFileError, match=r"absent.*config\.json or the folder"):
        DecoderConfig.from_hf(tmp_path / "absent")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json: not valid JSON"):
        DecoderConfig.from_hf(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json: must hold a JSON object"):
        DecoderConfig.from_hf(tmp_path / "list.json")
    (tmp_path / "odd.json").write_text(json.dumps(tiny_config(rms_norm_eps=None)))
    with pytest.raises(ModelFileError, match=r"odd\.json: rms_norm_eps must be a number above 0, got None"):
        DecoderConfig.from_hf(tmp_path / "odd.json")


def test_a_config_that_is_put_together_by_hand_is_checked_too():
    config = DecoderConfig.from_hf(tiny_config())
    for change, told in (
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0, got nan"),
        ({"eos_token_ids": (2, 512)}, r"eos_token_ids must be in \[0, vocab_size = 512\), got \[512\]"),
    ):
        with pytest.raises(ValueError, match=told):
            replace(config, **change)
    for theta in (float("nan"), float("inf"), 0.0):
        with pytest.raises(ValueError, match="rope_theta must be a finite number above 1"):
            RopeConfig(theta)
    with pytest.raises(ValueError, match="must be a finite number of at least 1, got nan"):
        RopeConfig(1e4, "linear", float("nan"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object"),
        (b'{"temperature": "hot"}', r"temperature must be a number in \[0, 2\], got 'hot'"),
        (b'{"temperature": []}', "temperature must be a number"),
        (b'{"temperature": 5}', r"temperature must be a number in \[0, 2\], got 5"),
        (b'{"temperature": NaN}', r"temperature must be a number in \[0, 2\], got nan"),
        (b'{"top_p": 0}', r"top_p must be a number in \(0, 1\], got 0"),
        (b'{"top_p": true}', r"top_p must be a number in \(0, 1\], got True"),
        (b'{"eos_token_id": "a"}', "eos_token_id must be one or several token ids"),
        (b'{"eos_token_id": [[1]]}', "eos_token_id must be one or several token ids"),
        (b'{"eos_token_id": [1, 512]}', r"eos_token_id must be .* in \[0, vocab_size = 512\), got \[1, 512\]"),
    ],
)
def test_a_generation_config_that_makes_no_sense_is_refused_by_file(content, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"generation_config\.json: {told}"):
        read_generation_config(tmp_path, VOCAB)
    with pytest.raises(ModelFileError, match=r"generation_config\.json: "):
        DecoderConfig.from_hf(tmp_path)


def test_a_generation_config_says_how_to_sample_or_leaves_it_open(tmp_path):
    assert read_generation_config(None) == read_generation_config(tmp_path) == (None, None, ())
    said = {"temperature": 0, "top_p": 0.9, "eos_token_id": [5, 2, 5], "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_generation_config(tmp_path) == (0.0, 0.9, (5, 2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None, "eos_token_id": None}))
    assert read_generation_config(tmp_path) == (None, None, ())


def test_sequences_must_fit_the_window_and_the_positions():
    windowed = DecoderConfig.from_hf(
        tiny_config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
    )
    assert windowed.max_model_len == 64
    windowed.check_max_model_len(64)
    with pytest.raises(ValueError, match="sliding window of 64 tokens"):
        windowed.check_max_model_len(65)
    with pytest.raises(ValueError, match="exceeds the 512 positions"):
        tiny_decoder(max_model_len=513)
    stretched = DecoderConfig.from_hf(tiny_config(rope_scaling=YARN))
    assert stretched.max_model_len == 256
    assert DecoderConfig.from_hf(tiny_config(rope_scaling={"type": "linear", "factor": 2.0})).max_model_len == 1024


def test_a_window_that_is_not_used_is_no_limit():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}
    assert DecoderConfig.from_hf(tiny_config(**qwen, use_sliding_window=False)).max_model_len == 512
    assert DecoderConfig.from_hf(tiny_config(**qwen, use_sliding_window=True)).max_model_len == 64
    whole = tiny_config(**qwen, use_sliding_window=True, layer_types=["full_attention"] * 2)
    assert DecoderConfig.from_hf(whole).max_model_len == 512


def test_rope_tables_hold_cosines_then_sines():
    table = RopeConfig(100.0).cos_sin(50, 4)
    assert table.shape == (50, 4)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[7], [np.cos(7), np.cos(0.7), np.sin(7), np.sin(0.7)], rtol=1e-6)


@pytest.mark.parametrize("options", [{"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False}, {}, {"beta_fast": 8.0}])
def test_yarn_keeps_or_slows_every_frequency_and_nothing_else(options):
    yarn = RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=64, **options).inverse_frequencies(32)
    plain = RopeConfig(1e4).inverse_frequencies(32)
    assert (yarn <= plain).all()
    assert (yarn >= plain / 4.0).all()
    assert yarn[0] == plain[0]
    assert yarn[-1] == plain[-1] / 4.0


# -- weights


def all_tensors(weights: Any) -> list[torch.Tensor]:
    return list(weights._all())


def test_random_weights_depend_on_seed_and_name_only():
    config = DecoderConfig.from_hf(tiny_config(attention_bias=True))
    first, again, other = (random_weights(config, seed) for seed in (3, 3, 4))
    for x, y in zip(all_tensors(first), all_tensors(again), strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(first.embedding, other.embedding)
    rounded = random_weights(config, 3, dtype=torch.bfloat16)
    assert torch.equal(first.layers[1].qkv.bfloat16(), rounded.layers[1].qkv)
    taller = random_weights(DecoderConfig.from_hf(tiny_config(attention_bias=True, vocab_size=600)), 3)
    assert torch.equal(taller.layers[0].gate_up, first.layers[0].gate_up)


def test_random_weights_have_the_variance_and_independence_of_noise():
    config = DecoderConfig.from_hf(tiny_config(hidden_size=256, intermediate_size=512, vocab_size=2048))
    weights = random_weights(config, 0)
    flat = weights.embedding.flatten().double() * 16.0  # variance 1 / 256
    assert abs(flat.mean()) < 0.01
    assert abs(flat.var() - 1.0) < 0.01
    for lag in (1, 2, 16, 255, 256, 4096):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 0.01
    gate, up = weights.layers[0].gate_up.double().chunk(2)
    assert abs((gate * up).mean() / gate.var()) < 0.02
    residual = random_weights(config, 0).layers[0].down.double()
    assert abs(residual.var() * 512 * 4 - 1.0) < 0.02, "smaller by the root of the 4 that add to the residual stream"


def test_activations_of_a_deep_random_model_stay_sane():
    deep = tiny_decoder(tiny_config(num_hidden_layers=40))
    logits = logits_at_once(deep, some_tokens(5, 30))
    assert 0.3 < logits.std() < 3.0
    assert logits.argmax(dim=-1).unique().numel() > 10


def test_weights_may_lie_in_several_files(tmp_path):
    theirs = transformers_model({})
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    config = DecoderConfig.from_hf(tmp_path / "many")
    one, many = load_weights(config, tmp_path / "one"), load_weights(config, tmp_path / "many")
    for x, y in zip(all_tensors(one), all_tensors(many), strict=True):
        assert torch.equal(x, y)


def checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(DecoderConfig.from_hf(config)).items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_every_tensor_that_does_not_fit_is_named(tmp_path):
    config = DecoderConfig.from_hf(tiny_config())
    tensors = checkpoint(tmp_path, tiny_config())
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(3)
    tensors["lm_head.weight"] = torch.zeros(5, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit the config") as caught:
        load_weights(config, tmp_path)
    told = str(caught.value)
    assert "1 missing: model.norm.weight" in told
    assert "1 unexpected: model.extra.weight" in told
    assert "1 ill-shaped: lm_head.weight is (5, 64), not (512, 64)" in told


def test_tensors_that_say_nothing_new_are_ignored(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = checkpoint(tmp_path, config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(512, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(DecoderConfig.from_hf(config), tmp_path)
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr()
    num_parameters = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert weights.num_bytes == 4 * (num_parameters - 8 - 512 * 64)


def test_a_folder_without_weights_says_what_to_do(tmp_path):
    config = DecoderConfig.from_hf(tiny_config())
    with pytest.raises(ModelFileError, match=r"model\.safetensors is missing.*or use random weights"):
        load_weights(config, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"part-1\.safetensors is missing"):
        load_weights(config, tmp_path)


def test_weights_say_where_they_come_from(tmp_path):
    config = DecoderConfig.from_hf(tiny_config())
    assert random_weights(config, 7).source == "random, seed 7"
    for folder in (None, tmp_path):
        found = weights_of(config, folder, 3)
        assert found.source == "random, seed 3"
        assert torch.equal(found.embedding, random_weights(config, 3).embedding)
    checkpoint(tmp_path, tiny_config())
    (tmp_path / "pytorch_model.bin").write_bytes(b"beside them it is of no concern")
    loaded = weights_of(config, tmp_path, 3)
    assert loaded.source == f"safetensors in {tmp_path}"
    assert not loaded.embedding.any()


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (INDEX, b'{"weight_map": {"a": "b.safetensors"}}', r"b\.safetensors is missing.*finish the download"),
        ("model.safetensors.incomplete", b"", r"model\.safetensors is missing \(there is .*incomplete\)"),
        ("adapter_model.safetensors", b"", r"there is adapter_model\.safetensors"),
        ("model-00001-of-00002.safetensors", b"", r"model\.safetensors is missing"),
        ("pytorch_model.bin", b"x", "from safetensors only, but the folder has pytorch_model.bin: convert them"),
        ("pytorch_model-00001-of-00002.bin", b"x", "from safetensors only"),
        ("consolidated.00.pth", b"x", "from safetensors only"),
        ("tiny.Q4_K_M.gguf", b"x", "from safetensors only"),
        ("model.safetensors", b"", r"model\.safetensors: not a readable safetensors file .*download it again"),
        ("model.safetensors", b"x" * 100, "not a readable safetensors file"),
        ("model.safetensors", struct.pack("<Q", 2**60) + b"{}", "not a readable safetensors file"),
        ("model.safetensors", struct.pack("<Q", 4) + b"abcd", "not a readable safetensors file"),
        (INDEX, b"{", r"index\.json: not valid JSON"),
        (INDEX, b"[]", r"index\.json: must hold a JSON object"),
        (INDEX, b"{}", "weight_map must name for each tensor a file of the folder"),
        (INDEX, b'{"weight_map": []}', "weight_map must name"),
        (INDEX, b'{"weight_map": {}}', "weight_map must name"),
        (INDEX, b'{"weight_map": {"a": 1}}', "weight_map must name"),
        (INDEX, b'{"weight_map": {"a": "../b.safetensors"}}', "weight_map must name"),
        (INDEX, b'{"weight_map": {"a": "/b.safetensors"}}', "weight_map must name"),
    ],
)
def test_broken_weights_are_no_random_weights(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=told) as caught:
        weights_of(DecoderConfig.from_hf(tiny_config()), tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_truncated_weights_are_refused(tmp_path):
    checkpoint(tmp_path, tiny_config())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="damaged or incomplete"):
        load_weights(DecoderConfig.from_hf(tiny_config()), tmp_path)


def test_a_folder_or_a_dead_link_in_place_of_the_weights_is_told(tmp_path):
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder" / "model.safetensors").mkdir(parents=True)
    for folder in ("dead", "folder"):
        with pytest.raises(ModelFileError, match=r"model\.safetensors is missing"):
            weights_of(DecoderConfig.from_hf(tiny_config()), tmp_path / folder)


@pytest.mark.parametrize(
    ("dtype", "called"),
    [
        (torch.int8, "I8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.complex64, "C64"),
    ],
)
def test_numbers_that_are_no_plain_floats_are_refused(dtype, called, tmp_path):
    tensors = checkpoint(tmp_path, tiny_config())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"1 of a type that is not .*BF16: model.norm.weight is {called}"):
        load_weights(DecoderConfig.from_hf(tiny_config()), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_plain_floats_of_any_width_are_read(dtype, tmp_path):
    tensors = checkpoint(tmp_path, tiny_config())
    tensors["model.norm.weight"] = torch.full((64,), 1.5, dtype=dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(DecoderConfig.from_hf(tiny_config()), tmp_path)
    assert weights.norm.dtype == torch.float32
    assert weights.norm.tolist() == [1.5] * 64


def test_a_tensor_that_is_in_two_files_is_read_from_the_one_that_the_index_names(tmp_path):
    config = DecoderConfig.from_hf(tiny_config())
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
    norm = "model.norm.weight"
    where = {name: "a.safetensors" if name == norm else "b.safetensors" for name in tensors}
    save_file({norm: torch.full((64,), 2.0)}, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    for first in ("a", "b"):  # whichever is opened first
        ordered = dict(sorted(where.items(), key=lambda item: not item[1].startswith(first)))
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": ordered}))
        assert load_weights(config, tmp_path).norm.tolist() == [2.0] * 64
    del where[norm]
    where["lm_head.weight"] = "a.safetensors"
    save_file({norm: tensors[norm], "lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight is in another file, too"):
        load_weights(config, tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_found_and_one_that_it_misplaces_is_missing(tmp_path):
    config = DecoderConfig.from_hf(tiny_config())
    tensors = checkpoint(tmp_path, tiny_config())
    some = dict.fromkeys(list(tensors)[:3], "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": some}))
    assert load_weights(config, tmp_path).source == f"safetensors in {tmp_path}"
    save_file({"model.extra": torch.zeros(1)}, tmp_path / "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": some | {"model.norm.weight": "b.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"1 missing: model\.norm\.weight; 1 unexpected: model\.extra"):
        load_weights(config, tmp_path)


# -- tensor parallelism


class Ranks:
    """All-reduce among threads, one for each rank."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._given: list[torch.Tensor | None] = [None] * size

    def all_reduce(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._given[rank] = x
        self._barrier.wait()
        total = sum(self._given)
        self._barrier.wait()
        return total


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_shards_together_are_the_whole_model(tp_size, tied):
    """With 4 ranks and 2 KV heads each KV head is on two ranks."""
    whole = DecoderConfig.from_hf(tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=tied))
    expected = logits_at_once(Decoder(whole, random_weights(whole, 5), TorchOps()), some_tokens(6, 30))
    ranks, config = Ranks(tp_size), whole.shard(tp_size)
    parts: list[torch.Tensor | None] = [None] * tp_size

    def work(rank: int) -> None:
        weights = random_weights(config, 5, tp_rank=rank)
        model = Decoder(config, weights, TorchOps(), all_reduce=lambda x: ranks.all_reduce(rank, x))
        parts[rank] = logits_at_once(model, some_tokens(6, 30))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(tp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_a_shard_computes_its_own_shapes_without_the_others():
    config = DecoderConfig.from_hf(tiny_config()).shard(4)
    model = Decoder(config, random_weights(config, tp_rank=3), TorchOps())
    assert logits_at_once(model, some_tokens(7, 9)).shape == (9, 128)
    assert model.weights.layers[0].qkv.shape == (16 * (1 + 1 + 1), 64)
    assert model.weights.layers[0].gate_up.shape == (2 * 28, 64)
    assert PagedKvCache(config, 5, 16).keys[0].shape == (5, 16, 1, 16)
    assert block_bytes(config, 16, torch.float16) == 2 * 16 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("tp_size", "told"),
    [
        (3, r"num_attention_heads \(4\) must be a multiple of tp_size \(3\)"),
        (8, "num_attention_heads"),
        (0, "tp_size must be at least 1"),
    ],
)
def test_what_cannot_be_split_is_refused(tp_size, told):
    with pytest.raises(ValueError, match=told):
        DecoderConfig.from_hf(tiny_config()).shard(tp_size)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match=r"tp_rank must be in \[0, 1\], got 2"):
        random_weights(DecoderConfig.from_hf(tiny_config()).shard(2), tp_rank=2)


# -- the plain operations


def test_sampling_takes_the_first_of_the_largest_at_temperature_zero():
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    zero, one = torch.zeros(1), torch.ones(1)
    assert TorchOps().sample(logits, zero, one, zero).tolist() == [1]


def test_sampling_follows_its_definition():
    """Against the definition in plain Python, greedy and random rows mixed."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 23, generator=draw) * 3
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(10)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.2, 1e-6]).repeat(8)
    uniform_numbers = torch.rand(40, generator=draw)
    expected = []
    for row, t, p, u in zip(logits, temperature.tolist(), top_p.tolist(), uniform_numbers.tolist(), strict=True):
        if t == 0:
            expected.append(int(row.argmax()))
            continue
        probabilities = torch.softmax(row.double() / t, dim=0).tolist()
        total, least = 0.0, 0.0
        for probability in sorted(probabilities, reverse=True):
            total, least = total + probability, probability
            if total >= p:
                break
        kept = [q if q >= least else 0.0 for q in probabilities]
        total, chosen = 0.0, -1
        for token, q in enumerate(kept):
            total += q
            if total > u * sum(kept):
                chosen = token
                break
        expected.append(chosen)
    assert TorchOps().sample(logits, temperature, top_p, uniform_numbers).tolist() == expected


def test_sampling_draws_tokens_as_often_as_they_are_likely():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, 4)
    uniform_numbers = (torch.arange(4000) + 0.5) / 4000
    drawn = TorchOps().sample(logits, torch.ones(4000), torch.ones(4000), uniform_numbers)
    assert drawn.bincount().tolist() == pytest.approx([400, 800, 1200, 1600], abs=1)
    nucleus = TorchOps().sample(logits, torch.ones(4000), torch.full((4000,), 0.6), uniform_numbers)
    assert nucleus.bincount(minlength=4).tolist() == pytest.approx([0, 0, 4000 * 3 / 7, 4000 * 4 / 7], abs=1)


NAN, INF = float("nan"), float("inf")


def drawn(row: list[float], temperature: float = 1.0, top_p: float = 1.0, uniform: float = 0.5) -> int:
    parameters = (torch.tensor([value]) for value in (temperature, top_p, uniform))
    return int(TorchOps().sample(torch.tensor([row]), *parameters))


@pytest.mark.parametrize("temperature", [1e-10, 1e-37, 1e-39, 1e-45])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_near_zero_takes_the_largest(temperature, top_p):
    logits = 3 * torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    rows = [torch.full((5,), value) for value in (temperature, top_p, 0.99)]
    assert TorchOps().sample(logits, *rows).tolist() == logits.argmax(dim=-1).tolist()


def test_the_lowest_temperature_is_that_of_the_kernel():
    """Logits that differ by less than it are both likely, whatever the temperature."""
    assert [drawn([0.0, 1e-31], temperature=1e-39, uniform=u) for u in (0.4, 0.6)] == [0, 1]


def test_one_odd_row_leaves_the_others_as_they_are():
    draw = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 50, generator=draw)
    uniform_numbers, one, heat = torch.rand(6, generator=draw), torch.ones(6), torch.ones(6)
    expected = TorchOps().sample(logits, heat, one, uniform_numbers)
    logits[2], heat[4] = NAN, 1e-39
    found = TorchOps().sample(logits, heat, one, uniform_numbers)
    kept = [0, 1, 3, 5]
    assert found[kept].tolist() == expected[kept].tolist()
    assert ((found >= 0) & (found < 50)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_is_never_taken(temperature):
    row = [NAN, -NAN, 2.0, -INF, NAN, 1.0, 2.0, -NAN]
    for top_p in (0.9, 1.0):
        tokens = [drawn(row, temperature, top_p, uniform) for uniform in (0.0, 0.5, 1.0)]
        assert tokens == ([2, 5, 6] if temperature else [2, 2, 2])


def test_infinite_logits_share_the_probability():
    row = [5.0, INF, NAN, INF]
    assert drawn(row, temperature=0.0) == 1
    assert [drawn(row, top_p=top_p, uniform=u) for top_p in (1.0, 0.9) for u in (0.1, 0.9)] == [1, 3, 1, 3]


@pytest.mark.parametrize("value", [-INF, NAN])
def test_a_row_without_a_possible_token_is_uniform(value):
    row = [value] * 4
    assert drawn(row, temperature=0.0) == 0
    assert [drawn(row, top_p=top_p, uniform=u) for top_p in (1.0, 0.9) for u in (0.1, 0.6, 0.9)] == [0, 2, 3] * 2


def test_neighbouring_numbers_are_told_apart_at_the_edge_of_the_nucleus():
    row = [0.0, 1.0 - 2.0**-23, 1.0, 2.0]  # from 2.0: gaps of 1 and of one unit more, of the same weight in float32
    shares = np.exp(row)
    enough_with_one = float((shares[3] + shares[2] / 2) / shares.sum())
    assert drawn(row, top_p=enough_with_one, uniform=0.0) == 2
    assert drawn(row, top_p=enough_with_one + float(shares[2] / shares.sum()), uniform=0.0) == 1


def test_sampling_stays_in_the_nucleus_when_rounding_lifts_the_target_to_the_sum():
    logits = torch.tensor([[0.0, 0.0, -1e9]])
    almost_one = torch.tensor([float(np.nextafter(np.float32(1), np.float32(0)))])
    assert TorchOps().sample(logits, torch.ones(1), torch.ones(1), almost_one).item() == 1
    assert TorchOps().sample(logits, torch.ones(1), torch.ones(1), torch.ones(1)).item() == 1


def padded(batch: StepBatch) -> StepBatch:
    """The batch with one more sequence that is padding: one row, no context, not stored."""
    one = torch.zeros(1, dtype=torch.int64)
    return batch._replace(
        token_ids=torch.cat([batch.token_ids, one]),
        positions=torch.cat([batch.positions, one]),
        slots=torch.cat([batch.slots, one - 1]),
        query_starts=torch.cat([batch.query_starts, batch.query_starts[-1:] + 1]),
        context_lens=torch.cat([batch.context_lens, one.int()]),
        block_tables=torch.cat([batch.block_tables, torch.zeros_like(batch.block_tables[:1])]),
    )


def test_padding_rows_change_nothing_and_are_not_stored():
    model = tiny_decoder()
    view = OneSequence(some_tokens(8, 10), [2, 1])
    batch = BatchBuilder(8, 64).build([Grant(view.request, 10, 0, True)], view).to_device("cpu")
    caches = [PagedKvCache(model.config, 3, 8) for _ in range(2)]
    with torch.inference_mode():
        plain, with_padding = model.forward(batch, caches[0]), model.forward(padded(batch), caches[1])
    torch.testing.assert_close(with_padding, plain)
    for x, y in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True):
        torch.testing.assert_close(x, y)


def test_an_fp8_cache_is_close_and_never_overflows():
    model = tiny_decoder()
    tokens = some_tokens(9, 24)
    view = OneSequence(tokens, [3, 1, 2])
    batch = BatchBuilder(8, 64).build([Grant(view.request, 24, 0, True)], view).to_device("cpu")
    exact = PagedKvCache(model.config, 4, 8)
    with torch.inference_mode():
        expected = model.forward(batch, exact)
        for scale in (1.0, 0.01):
            small = PagedKvCache(model.config, 4, 8, dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
            logits = model.forward(batch, small)
            assert torch.nn.functional.cosine_similarity(logits, expected).item() > 0.99
        tiny = PagedKvCache(model.config, 4, 8, dtype=torch.float8_e4m3fn, k_scale=1e-6, v_scale=1e-6)
        assert model.forward(batch, tiny).isfinite().all()
    assert small.num_bytes * 4 == exact.num_bytes


def test_norms_and_activations_agree_with_float64():
    ops, draw = TorchOps(), torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 24, generator=draw), torch.randn(7, 24, generator=draw)
    weight = torch.randn(24, generator=draw)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        a, b, w = x.to(dtype), y.to(dtype), weight.to(dtype)
        normed, total = ops.add_rms_norm(a, b, w, 1e-5)
        exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
        assert normed.dtype == total.dtype == dtype
        torch.testing.assert_close(total, a + b)
        torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=tolerance)
        gate, up = a.double().chunk(2, dim=-1)
        silu = ops.silu_and_mul(a)
        torch.testing.assert_close(silu.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance)


def test_a_cache_that_makes_no_sense_is_refused():
    config = DecoderConfig.from_hf(tiny_config())
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        PagedKvCache(config, 0, 16)
    with pytest.raises(ValueError, match="k_scale must be above 0"):
        PagedKvCache(config, 4, 16, k_scale=0.0)
