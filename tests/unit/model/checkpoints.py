"""Checkpoints and engines for tests of the model: tiny random ones, and the shipped one."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from libs.model.args import ModelArgs
from libs.model.engine import Engine
from libs.model.weights import load_checkpoint, tensor_shapes

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


@cache
def shipped(mode: str) -> Engine:
    """The engine of the shipped checkpoint; engines hold no state, so tests may share it."""
    return Engine(load_checkpoint(), mode)


def random_tokens(count: int, seed: int = 0, vocab: int = 2048) -> list[int]:
    """Token ids without special tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(16, vocab, count)]


def random_tensors(args: ModelArgs, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of the whole layout, scaled so that activations stay near one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(args).items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.2 * values
        elif len(shape) == 2:
            values = values / np.sqrt(shape[1])
        else:
            values = 0.1 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write arrays under explicit storage types (numpy knows neither BF16 nor F8)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header).encode()
    content = b"".join(np.ascontiguousarray(values).tobytes() for _, values in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def write_checkpoint(
    folder: Path, seed: int = 0, tensors: dict[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """A random checkpoint folder; `changes` go into its config, `tensors` replace random ones."""
    config = TINY | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    values = random_tensors(ModelArgs.from_config(config), seed) | (tensors or {})
    stored = {name: ("F32", array.astype(np.float32)) for name, array in values.items()}
    write_safetensors(folder / "model.safetensors", stored)
    return folder
