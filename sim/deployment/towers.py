"""Vision towers and projectors of multimodal models: their weights.

The towers are those that vLLM 0.32 builds; where a config does not say enough, the tower is named as not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from windtunnel.sim.deployment.config_reader import ConfigReader
from windtunnel.sim.deployment.weights import Parameter


class Towers(NamedTuple):
    """What a multimodal model has beside its language model."""

    parameters: tuple[Parameter, ...] = ()
    not_counted: tuple[str, ...] = ()
    """Parts whose weights do not follow from the config, in words."""


def towers(config: Mapping[str, Any], hidden_size: int, name: str) -> Towers:
    """The towers that ``config`` (the whole file) names, for a language model of ``hidden_size``.

    Raises ValueError for a missing or impossible value.
    """
    architecture = _architecture(config)
    parameters: tuple[Parameter, ...] = ()
    missing: list[str] = []
    build = _VISION.get(architecture)
    if isinstance(config.get("vision_config"), Mapping) and build is not None:
        reader = ConfigReader(config["vision_config"], f"{name}, vision_config")
        parameters = tuple(build(_Vision(reader, config, hidden_size)))
    elif config.get("vision_config") or architecture in _SEES:
        missing.append("vision tower")
    if config.get("audio_config"):
        missing.append("audio tower")
    return Towers(parameters, tuple(missing))


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


class _Vision(NamedTuple):
    read: ConfigReader
    config: Mapping[str, Any]
    out_size: int

    def whole(self, key: str, default: int | None = None) -> int:
        return self.read.whole(key, default=default)


def _matrix(name: str, outputs: int, inputs: int, split: str = "", units: int = 0) -> Parameter:
    return Parameter(f"visual.{name}", outputs, inputs, split, units, linear=False)


def _linear(name: str, outputs: int, inputs: int, split: str = "", units: int = 0) -> Iterator[Parameter]:
    """A matrix with its bias, which is shared out only with the outputs."""
    yield _matrix(name, outputs, inputs, split, units)
    yield _matrix(f"{name}.bias", outputs, 1, split if split == "outputs" else "", units)


def _block(width: int, intermediate: int, heads: int) -> Iterator[Parameter]:
    """A block of a plain vision transformer with biases and two LayerNorms."""
    yield from _linear("attn.qkv", 3 * width, width, "outputs", heads)
    yield from _linear("attn.proj", width, width, "inputs", heads)
    yield from _linear("mlp.fc1", intermediate, width, "outputs")
    yield from _linear("mlp.fc2", width, intermediate, "inputs")
    yield _matrix("norms", 4 * width, 1)


def _qwen3(vision: _Vision) -> Iterator[Parameter]:
    """Qwen3-VL and Qwen3.5."""
    width, patch = vision.whole("hidden_size"), vision.whole("patch_size")
    pixels = vision.whole("in_channels", 3) * vision.whole("temporal_patch_size", 2) * patch * patch
    yield from _linear("patch_embed", width, pixels)
    yield _matrix("pos_embed", vision.whole("num_position_embeddings"), width)
    for _ in range(vision.whole("depth")):
        yield from _block(width, vision.whole("intermediate_size"), vision.whole("num_heads"))
    merged = width * vision.whole("spatial_merge_size", 2) ** 2
    yield _matrix("merger.norm", 2 * width, 1)
    yield from _merger(merged, vision.whole("out_hidden_size"))
    for _ in vision.read.listed("deepstack_visual_indexes"):
        yield _matrix("deepstack.norm", 2 * merged, 1)
        yield from _merger(merged, vision.whole("out_hidden_size"))


def _merger(merged: int, out_size: int) -> Iterator[Parameter]:
    yield from _linear("merger.fc1", merged, merged, "outputs")
    yield from _linear("merger.fc2", out_size, merged, "inputs")


def _qwen2_5(vision: _Vision) -> Iterator[Parameter]:
    """Qwen2.5-VL: gated blocks with RMSNorm."""
    width, patch = vision.whole("hidden_size"), vision.whole("patch_size")
    intermediate, heads = vision.whole("intermediate_size"), vision.whole("num_heads")
    pixels = vision.whole("in_channels", 3) * vision.whole("temporal_patch_size", 2) * patch * patch
    yield _matrix("patch_embed", width, pixels)
    for _ in range(vision.whole("depth")):
        yield from _linear("attn.qkv", 3 * width, width, "outputs", heads)
        yield from _linear("attn.proj", width, width, "inputs", heads)
        yield from _linear("mlp.gate", intermediate, width, "outputs")
        yield from _linear("mlp.up", intermediate, width, "outputs")
        yield from _linear("mlp.down", width, intermediate, "inputs")
        yield _matrix("norms", 2 * width, 1)
    yield _matrix("merger.norm", width, 1)
    yield from _merger(width * vision.whole("spatial_merge_size", 2) ** 2, vision.whole("out_hidden_size"))


def _gemma4(vision: _Vision) -> Iterator[Parameter]:
    """Gemma 4: a tower that every GPU holds whole."""
    width, patch, heads = vision.whole("hidden_size"), vision.whole("patch_size"), vision.whole("num_attention_heads")
    head_dim, intermediate = vision.whole("head_dim", width // heads), vision.whole("intermediate_size")
    yield _matrix("patch_embedder", width, 3 * patch * patch)
    yield _matrix("positions", 2 * vision.whole("position_embedding_size"), width)
    for _ in range(vision.whole("num_hidden_layers")):
        yield _matrix("attn", 4 * heads * head_dim, width)
        yield _matrix("mlp", 3 * intermediate, width)
        yield _matrix("norms", 4 * width + 2 * head_dim, 1)
    if vision.read.config.get("standardize"):
        yield _matrix("standardize", 2 * width, 1)
    yield _matrix("projection", vision.out_size, width)


def _siglip(vision: _Vision) -> Iterator[Parameter]:
    """Gemma 3: SigLIP and a projection."""
    width, patch = vision.whole("hidden_size"), vision.whole("patch_size")
    yield from _linear("patch_embedding", width, 3 * patch * patch)
    yield _matrix("positions", (vision.whole("image_size") // patch) ** 2, width)
    for _ in range(vision.whole("num_hidden_layers")):
        yield from _block(width, vision.whole("intermediate_size"), vision.whole("num_attention_heads"))
    yield _matrix("post_layernorm", 2 * width, 1)
    yield _matrix("projector.norm", width, 1)
    yield _matrix("projector", width, vision.out_size)


def _pixtral(vision: _Vision) -> Iterator[Parameter]:
    """Mistral 3: Pixtral, a patch merger and a projector of two matrices."""
    width, patch, heads = vision.whole("hidden_size"), vision.whole("patch_size"), vision.whole("num_attention_heads")
    head_dim, intermediate = vision.whole("head_dim", width // heads), vision.whole("intermediate_size")
    yield _matrix("patch_conv", width, vision.whole("num_channels", 3) * patch * patch)
    yield _matrix("ln_pre", width, 1)
    for _ in range(vision.whole("num_hidden_layers")):
        yield _matrix("attn.qkv", 3 * heads * head_dim, width, "outputs", heads)
        yield _matrix("attn.o", width, heads * head_dim, "inputs", heads)
        yield _matrix("mlp.gate_up", 2 * intermediate, width, "outputs", intermediate)
        yield _matrix("mlp.down", width, intermediate, "inputs")
        yield _matrix("norms", 2 * width, 1)
    merge = ConfigReader(vision.config, vision.read.name).whole("spatial_merge_size", default=2)
    yield _matrix("projector.norm", width, 1)
    yield _matrix("projector.merge", width, width * merge * merge)
    yield _matrix("projector.linear_1", vision.out_size, width, "outputs")
    yield _matrix("projector.linear_2", vision.out_size, vision.out_size, "inputs")


def _moonvit(vision: _Vision) -> Iterator[Parameter]:
    """Kimi K2.5: MoonViT and a projector that every GPU holds whole."""
    width, patch = vision.whole("vt_hidden_size"), vision.whole("patch_size")
    yield from _linear("patch_embed", width, 3 * patch * patch)
    grid = vision.whole("init_pos_emb_height") * vision.whole("init_pos_emb_width")
    yield _matrix("positions", grid, width)
    for _ in range(vision.whole("vt_num_hidden_layers")):
        yield from _block(width, vision.whole("vt_intermediate_size"), vision.whole("vt_num_attention_heads"))
    yield _matrix("norms", 4 * width, 1)
    merged = width * 4
    yield from _linear("projector.linear_1", merged, merged)
    yield from _linear("projector.linear_2", vision.out_size, merged)


def _llama4(vision: _Vision) -> Iterator[Parameter]:
    """Llama 4: a vision transformer, a pixel shuffle adapter and a projection."""
    width, patch = vision.whole("hidden_size"), vision.whole("patch_size")
    yield _matrix("patch_embedding", width, 3 * patch * patch, "outputs")
    yield _matrix("positions", (vision.whole("image_size") // patch) ** 2 + 2, width)  # with the class token
    yield _matrix("norms", 4 * width, 1)
    for _ in range(vision.whole("num_hidden_layers")):
        yield from _block(width, vision.whole("intermediate_size"), vision.whole("num_attention_heads"))
    shuffled, out_size = vision.whole("intermediate_size"), vision.whole("projector_output_dim")
    yield _matrix("adapter.fc1", vision.whole("projector_input_dim"), shuffled, "outputs")
    yield _matrix("adapter.fc2", out_size, vision.whole("projector_input_dim"), "inputs")
    yield _matrix("projection", vision.out_size, vision.whole("vision_output_dim"), "outputs")


_VISION: dict[str, Callable[[_Vision], Iterator[Parameter]]] = {
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3,
    "Qwen3_5MoeForConditionalGeneration": _qwen3,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5,
    "Gemma3ForConditionalGeneration": _siglip,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Mistral3ForConditionalGeneration": _pixtral,
    "KimiK25ForConditionalGeneration": _moonvit,
    "Llama4ForConditionalGeneration": _llama4,
}
_SEES = frozenset(_VISION)
