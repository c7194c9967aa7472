"""A decoder's weights: random by seed, or from the safetensors of a local folder; whole, or one rank's share.

Projections that read the same input are fused: queries, keys and values into one matrix, gate and up into another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.model_files import ModelFileError, read_json_object

_PIECE = 1 << 20  # elements drawn at a time: what fits a CPU's cache; a GPU takes larger ones
_IGNORED = (".rotary_emb.inv_freq",)  # old Llama checkpoints carry what the config says anyway
_DTYPES = ("F64", "F32", "F16", "BF16")  # in the words of safetensors; others need scales, which nothing here applies
_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (
    *("pytorch_model*.bin", "pytorch_model*.bin.index.json", "consolidated*.pth", "*.pt", "*.ckpt", "*.gguf"),
    *("tf_model*.h5", "flax_model*.msgpack"),
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs], as ``torch.nn.functional.linear`` takes them; absent ones are None."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of one rank."""

    embedding: torch.Tensor
    """[vocab, hidden], whole on every rank."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    """[the rank's part of the vocab, hidden]; part of the embedding where the two are tied."""
    source: str
    """Where they come from: ``random, seed 0`` or ``safetensors in FOLDER``."""

    @property
    def num_bytes(self) -> int:
        """Memory that they take; a tied output projection takes none."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._all()}
        return sum(storages.values())

    def _all(self) -> Iterator[torch.Tensor]:
        yield from (self.embedding, self.norm, self.lm_head)
        for layer in self.layers:
            for name in layer.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    yield tensor


class TensorSource(Protocol):
    """Where whole tensors come from, under the names of Hugging Face checkpoints."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name, which has that shape."""


def weights_of(
    config: DecoderConfig,
    folder: Path | None,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> DecoderWeights:
    """``load_weights`` where the folder has any weights, however incomplete; else ``random_weights``.

    Raises ModelFileError as ``load_weights``, and for a folder whose weights have another format.
    """
    if folder is None or not _holds_weights(folder):
        return random_weights(config, seed, dtype=dtype, device=device)
    return load_weights(config, folder, dtype=dtype, device=device)


def random_weights(
    config: DecoderConfig,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
) -> DecoderWeights:
    """Weights that depend only on the seed, each tensor's name and its shape.

    They are uniform with the variance 1 / inputs, those that write to the residual stream smaller by the root of
    their number, so that activations keep their size whatever the depth; norms are 1.  Before they are rounded to
    ``dtype`` they are the same on every device.
    """
    tensors = _RandomTensors(config, seed, torch.device(device))
    return _assemble(config, tensors, dtype, torch.device(device), tp_rank, f"random, seed {seed}")


def load_weights(
    config: DecoderConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
) -> DecoderWeights:
    """Weights from ``model.safetensors`` in the folder, or from the files that ``model.safetensors.index.json`` names.

    Raises ModelFileError (a ValueError) if a file is missing or damaged, and one that names every tensor that is
    missing, unexpected, no floating-point number or of another shape than the config says.
    """
    with _SafetensorsFolder(Path(folder)) as tensors:
        tensors.check(tensor_shapes(config))
        return _assemble(config, tensors, dtype, torch.device(device), tp_rank, f"safetensors in {folder}")


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the whole model and their shapes, under the names of Hugging Face checkpoints."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def add(name: str, num_out: int, num_in: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        add(f"{layer}.self_attn.q_proj", heads, hidden, config.qkv_bias)
        add(f"{layer}.self_attn.k_proj", kv_heads, hidden, config.qkv_bias)
        add(f"{layer}.self_attn.v_proj", kv_heads, hidden, config.qkv_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        add(f"{layer}.self_attn.o_proj", hidden, heads, config.o_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        add(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        add(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        add(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


# -- putting them together


def _assemble(
    config: DecoderConfig, tensors: TensorSource, dtype: torch.dtype, device: torch.device, tp_rank: int, source: str
) -> DecoderWeights:
    if not 0 <= tp_rank < config.tp_size:
        raise ValueError(f"tp_rank must be in [0, {config.tp_size - 1}], got {tp_rank}")
    shapes = tensor_shapes(config)

    def whole(name: str) -> torch.Tensor:
        return tensors.tensor(name, shapes[name]).to(device=device, dtype=dtype).contiguous()

    embedding = whole("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else whole("lm_head.weight")
    head = _part(head, tp_rank, config.tp_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(config, whole, f"model.layers.{i}", tp_rank) for i in range(config.num_hidden_layers)),
        norm=whole("model.norm.weight"),
        lm_head=head if config.tie_word_embeddings else head.clone(),
        source=source,
    )


def _layer(config: DecoderConfig, whole: Callable[[str], torch.Tensor], layer: str, rank: int) -> LayerWeights:
    size = config.tp_size
    kv_size = min(size, config.num_key_value_heads)  # ranks beyond the number of KV heads hold copies
    kv_rank = rank * kv_size // size

    def fused(parts: list[tuple[str, int, int]], kind: str) -> torch.Tensor:
        return torch.cat([_part(whole(f"{layer}.{name}.{kind}"), r, n) for name, r, n in parts])

    def columns(name: str) -> torch.Tensor:
        return _part(whole(f"{layer}.{name}.weight"), rank, size, dim=1).clone()

    def added_once(name: str, exists: bool) -> torch.Tensor | None:
        return whole(f"{layer}.{name}.bias") if exists and rank == 0 else None

    qkv = [
        ("self_attn.q_proj", rank, size),
        ("self_attn.k_proj", kv_rank, kv_size),
        ("self_attn.v_proj", kv_rank, kv_size),
    ]
    gate_up = [("mlp.gate_proj", rank, size), ("mlp.up_proj", rank, size)]
    return LayerWeights(
        input_norm=whole(f"{layer}.input_layernorm.weight"),
        qkv=fused(qkv, "weight"),
        qkv_bias=fused(qkv, "bias") if config.qkv_bias else None,
        q_norm=whole(f"{layer}.self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=whole(f"{layer}.self_attn.k_norm.weight") if config.qk_norm else None,
        o=columns("self_attn.o_proj"),
        o_bias=added_once("self_attn.o_proj", config.o_bias),
        post_attention_norm=whole(f"{layer}.post_attention_layernorm.weight"),
        gate_up=fused(gate_up, "weight"),
        gate_up_bias=fused(gate_up, "bias") if config.mlp_bias else None,
        down=columns("mlp.down_proj"),
        down_bias=added_once("mlp.down_proj", config.mlp_bias),
    )


def _part(tensor: torch.Tensor, rank: int, size: int, dim: int = 0) -> torch.Tensor:
    """The rank's equal share along a dimension, as a view."""
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)


# -- where they come from


class _RandomTensors:
    """Tensors whose elements are a hash of seed, name and index."""

    def __init__(self, config: DecoderConfig, seed: int, device: torch.device) -> None:
        self._num_residual_writers = 2 * config.num_hidden_layers
        self._seed = seed
        self._device = device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, device=self._device)
        std = 0.02 if name.endswith(".bias") else shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std *= self._num_residual_writers**-0.5
        return _uniform(shape, zlib.crc32(f"{self._seed}/{name}".encode()), std * 3.0**0.5, self._device)


def _uniform(shape: tuple[int, ...], key: int, most: float, device: torch.device) -> torch.Tensor:
    """Numbers in [-most, most): multiples of 2**-23, from whole-number arithmetic that is the same on every device."""
    out = torch.empty(shape, dtype=torch.float32, device=device)
    flat = out.view(-1)
    piece = _PIECE if device.type == "cpu" else _PIECE << 6
    for begin in range(0, flat.numel(), piece):
        part = flat[begin : begin + piece]
        index = torch.arange(begin, begin + part.numel(), dtype=torch.int32, device=device)
        part.copy_(_hash(index, _signed(key)) >> 8)
    return out.mul_(2.0**-23 * most)


def _hash(x: torch.Tensor, key: int) -> torch.Tensor:
    """Mix 32-bit whole numbers in place, with a key so that no two keys give the same numbers in the same order.

    Source of the mixing: lowbias32 (Wellons, "Prospecting for Hash Functions", 2018).
    """
    _fold(x, 16).mul_(0x7FEB352D).add_(key)
    _fold(x, 15).mul_(_signed(0x846CA68B))
    return _fold(x, 16)


def _fold(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x ^ x >> shift, without the sign."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _holds_weights(folder: Path) -> bool:
    """Whether there are safetensors or what a broken download leaves of them.

    Raises ModelFileError if there are weights, but in other formats only.
    """
    if any(folder.glob("*.safetensors*")):  # the index and unfinished files, too
        return True
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise ModelFileError(
            f"{folder}: weights are read from safetensors only, but the folder has {_some(others)}: convert them to "
            "model.safetensors, or remove them to use random weights"
        )
    return False


class _SafetensorsFolder:
    """The tensors of a checkpoint in one or several safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            where = _read_index(self._folder)
            for file_name in self._file_names(where):
                self._enter(file_name, where)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises ModelFileError if the tensors are not exactly these."""
        views = {name: self._files[name].get_slice(name) for name in shapes if name in self._files}
        faults = [
            ("missing", [name for name in shapes if name not in views]),
            ("unexpected", [name for name in self._files if name not in shapes and not _may_be_ignored(name, shapes)]),
            (
                "ill-shaped",
                [
                    f"{name} is {found}, not {shapes[name]}"
                    for name, view in views.items()
                    if (found := tuple(view.get_shape())) != shapes[name]
                ],
            ),
            (
                f"of a type that is not one of {', '.join(_DTYPES)}",
                [f"{name} is {found}" for name, view in views.items() if (found := view.get_dtype()) not in _DTYPES],
            ),
        ]
        if any(names for _, names in faults):
            told = "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in faults if names)
            raise ModelFileError(
                f"{self._folder}: the weights do not fit the config.json: {told}; give the whole, unquantised model"
            )

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        return self._files[name].get_tensor(name)

    def _file_names(self, where: dict[str, str]) -> list[str]:
        """Raises ModelFileError if one of them is not there."""
        names = list(dict.fromkeys(where.values())) or ["model.safetensors"]
        absent = [name for name in names if not (self._folder / name).is_file()]
        if absent:
            there = sorted(path.name for path in self._folder.glob("*.safetensors*"))
            raise ModelFileError(
                f"{self._folder}: {_some(absent)} is missing{f' (there is {_some(there)})' if there else ''}: finish "
                f"the download, so that the folder has model.safetensors, or {_INDEX} and all files that it names; or "
                "use random weights, in a folder without any"
            )
        return names

    def _enter(self, file_name: str, where: dict[str, str]) -> None:
        """Open a file for the tensors that are its own: those that the index says, and those that it leaves out."""
        from safetensors import SafetensorError, safe_open  # lazily: random weights need none

        path = self._folder / file_name
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"{path}: not a readable safetensors file ({error}): it is damaged or incomplete, download it again"
            ) from None
        for name in file.keys():  # noqa: SIM118 -- it is no dict
            if where.get(name, file_name) == file_name:
                if name in self._files:
                    raise ModelFileError(f"{path}: {name} is in another file, too, and {_INDEX} does not say which")
                self._files[name] = file


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor by the folder's index, relative to the folder; empty if it has none."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    where = read_json_object(path).get("weight_map")
    if not isinstance(where, dict) or not where or not all(_is_inside(name) for name in where.values()):
        raise ModelFileError(
            f"{path}: weight_map must name for each tensor a file of the folder, got {str(where)[:80]}: download it "
            "again"
        )
    return where


def _is_inside(name: Any) -> bool:
    return isinstance(name, str) and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


def _may_be_ignored(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    return name.endswith(_IGNORED) or (name == "lm_head.weight" and name not in shapes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
