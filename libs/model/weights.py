"""Checkpoints: the public DeepSeek-V3 safetensors layout, opened, checked, read by tensor.

A checkpoint is a folder with `config.json` and `model.safetensors` (or shards listed in
`model.safetensors.index.json`). `mtp2.safetensors` may lie beside them and add one more trained MTP
layer, so that the main file stays an ordinary one. Every expected tensor is checked by name and
shape when the folder is opened, before anything is computed. Files are mapped, not read, so that a
die that holds two experts touches only their pages.

Storage types: F32, F16, BF16 (its 16 bits are the upper half of a float32), and F8_E4M3 with
`weight_scale_inv` per 128 x 128 block. All become float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.errors import BadInput
from libs.model.args import ModelArgs

Float32 = NDArray[np.float32]

SHIPPED = Path(__file__).parent / "data" / "xds-tiny"
FP8_BLOCK = 128

_STORAGE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: its file, type, shape and byte range within the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened and checked checkpoint. `args` counts the MTP layers that were really found."""

    path: Path
    args: ModelArgs
    files: tuple[Path, ...]
    stored: dict[str, StoredTensor]
    mapped: dict[Path, NDArray[np.uint8]]

    def tensor(self, name: str) -> Float32:
        """Read one tensor as float32; the name must be in the layout."""
        assert name in self.stored, name
        entry = self.stored[name]
        raw = self.mapped[entry.path][entry.start : entry.stop]
        values = raw.view(_STORAGE[entry.dtype]).reshape(entry.shape)
        match entry.dtype:
            case "BF16":
                return (values.astype(np.uint32) << 16).view(np.float32)
            case "F8_E4M3":
                return self._dequantised(name, values)
            case "F32" | "F16":
                return values.astype(np.float32)
            case _:
                raise AssertionError(entry.dtype)

    def _dequantised(self, name: str, codes: NDArray[Any]) -> Float32:
        scales = self.tensor(f"{name}_scale_inv")
        rows, columns = codes.shape
        spread = np.repeat(np.repeat(scales, FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
        product: Float32 = _E4M3[codes] * spread[:rows, :columns]
        return product


def load_checkpoint(path: Path | None = None) -> Checkpoint:
    """Open a checkpoint folder, by default the shipped `xds-tiny`.

    `BadInput` says what is wrong: the field of `config.json`, or the tensor with its expected and
    found shape.
    """
    folder = SHIPPED if path is None else path
    args = ModelArgs.from_config(read_json(folder / "config.json"))
    files = list(_weight_files(folder))
    stored, mapped = _open_files(files)
    extra = folder / "mtp2.safetensors"
    if extra.is_file():
        more_stored, more_mapped = _open_files([extra])
        stored, mapped = stored | more_stored, mapped | more_mapped
        files.append(extra)
        args = replace(args, num_nextn_predict_layers=args.num_nextn_predict_layers + 1)
    checkpoint = Checkpoint(folder, args, tuple(files), stored, mapped)
    _check_tensors(checkpoint)
    return checkpoint


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object of a checkpoint folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file", field=path.name) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not readable as JSON: {error}", field=path.name) from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold a JSON object", field=path.name)
    return value


def tensor_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Every tensor of the layout and its shape (`[out, in]` for matrices)."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (args.vocab_size, args.hidden_size),
        "model.norm.weight": (args.hidden_size,),
    }
    if not args.tie_word_embeddings:
        shapes["lm_head.weight"] = (args.vocab_size, args.hidden_size)
    for layer in range(args.num_kv_layers):
        shapes |= _attention_shapes(args, f"model.layers.{layer}.")
        shapes |= _mlp_shapes(args, layer)
    for layer in range(args.num_hidden_layers, args.num_kv_layers):
        prefix, hidden = f"model.layers.{layer}.", args.hidden_size
        shapes[f"{prefix}enorm.weight"] = (hidden,)
        shapes[f"{prefix}hnorm.weight"] = (hidden,)
        shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[f"{prefix}shared_head.norm.weight"] = (hidden,)
    return shapes


def expert_prefix(args: ModelArgs, layer: int, expert: int) -> str:
    """Where the three matrices of one expert are named."""
    if expert == args.shared_expert:
        return f"model.layers.{layer}.mlp.shared_experts."
    return f"model.layers.{layer}.mlp.experts.{expert}."


def _attention_shapes(args: ModelArgs, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    queries = heads * args.qk_head_dim
    attention = f"{prefix}self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{attention}kv_a_proj_with_mqa.weight": (args.kv_width, hidden),
        f"{attention}kv_a_layernorm.weight": (args.kv_lora_rank,),
        f"{attention}kv_b_proj.weight": (
            heads * (args.qk_nope_head_dim + args.v_head_dim),
            args.kv_lora_rank,
        ),
        f"{attention}o_proj.weight": (hidden, heads * args.v_head_dim),
    }
    if args.q_lora_rank is None:
        shapes[f"{attention}q_proj.weight"] = (queries, hidden)
    else:
        shapes[f"{attention}q_a_proj.weight"] = (args.q_lora_rank, hidden)
        shapes[f"{attention}q_a_layernorm.weight"] = (args.q_lora_rank,)
        shapes[f"{attention}q_b_proj.weight"] = (queries, args.q_lora_rank)
    return shapes


def _mlp_shapes(args: ModelArgs, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}.mlp."
    if not args.is_moe(layer):
        return _gated_shapes(prefix, args.hidden_size, args.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}gate.weight": (args.n_routed_experts, args.hidden_size),
        f"{prefix}gate.e_score_correction_bias": (args.n_routed_experts,),
    }
    for expert in args.expert_ids():
        width = args.expert_intermediate_size(expert)
        shapes |= _gated_shapes(expert_prefix(args, layer, expert), args.hidden_size, width)
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        yield folder / "model.safetensors"
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index}: weight_map is missing or empty", field="weight_map")
    for name in sorted({str(shard) for shard in weight_map.values()}):
        if Path(name).name != name:
            raise BadInput(f"{index}: {name!r} is not a plain file name", field="weight_map")
        yield folder / name


def _open_files(
    files: list[Path],
) -> tuple[dict[str, StoredTensor], dict[Path, NDArray[np.uint8]]]:
    stored: dict[str, StoredTensor] = {}
    mapped: dict[Path, NDArray[np.uint8]] = {}
    for path in files:
        try:
            mapped[path] = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise BadInput(f"{path}: no such file", field=path.name) from None
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: not readable: {error}", field=path.name) from error
        stored |= _read_header(path, mapped[path])
    return stored, mapped


def _read_header(path: Path, content: NDArray[np.uint8]) -> dict[str, StoredTensor]:
    """Parse a safetensors header: 8 bytes of length, JSON, then the tensors' bytes."""
    length = int.from_bytes(content[:8].tobytes(), "little")
    if content.size < 8 or length > content.size - 8:
        raise BadInput(f"{path}: truncated, or not a safetensors file", field=path.name)
    try:
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        entries = {
            str(name): StoredTensor(
                path,
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
                8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInput(
            f"{path}: malformed safetensors header: {error!r}", field=path.name
        ) from None
    for name, tensor in entries.items():
        _check_stored(name, tensor, content.size)
    return entries


def _check_stored(name: str, tensor: StoredTensor, file_size: int) -> None:
    storage = _STORAGE.get(tensor.dtype)
    if storage is None:
        raise BadInput(
            f"{tensor.path}: tensor {name} is stored as {tensor.dtype}; "
            f"known types are {', '.join(_STORAGE)}",
            field=name,
        )
    expected = int(np.prod(tensor.shape, dtype=np.int64)) * storage.itemsize
    inside = 8 <= tensor.start <= tensor.stop <= file_size
    if not inside or tensor.stop - tensor.start != expected:
        raise BadInput(
            f"{tensor.path}: tensor {name} of shape {list(tensor.shape)} needs {expected} bytes, "
            f"its entry spans {tensor.stop - tensor.start} of a file of {file_size}",
            field=name,
        )


def _check_tensors(checkpoint: Checkpoint) -> None:
    for name, shape in tensor_shapes(checkpoint.args).items():
        _check_tensor(checkpoint, name, shape)
        if checkpoint.stored[name].dtype == "F8_E4M3":
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            _check_tensor(checkpoint, f"{name}_scale_inv", blocks)


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    found = checkpoint.stored.get(name)
    if found is None:
        raise BadInput(
            f"{checkpoint.path}: tensor {name} is missing, expected shape {list(shape)}",
            field=name,
        )
    if found.shape != shape:
        raise BadInput(
            f"{checkpoint.path}: tensor {name} has shape {list(found.shape)}, "
            f"expected {list(shape)}",
            field=name,
        )


def _e4m3_table() -> Float32:
    """The values of the 256 codes: sign, 4 exponent bits (bias 7), 3 mantissa bits, no inf."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8.0, -6),
        np.ldexp(1.0 + mantissa / 8.0, exponent - 7),
    )
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
