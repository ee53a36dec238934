"""What a checkpoint is made of: the facts behind `xds model info` and the capacity arithmetic.

Counts are parameters, sizes are bytes; everything follows from the checked tensor table and the
arithmetic's own bit budgets.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from libs.model import exact
from libs.model.args import ModelArgs
from libs.model.weights import Checkpoint, tensor_shapes

_PARTS = (
    ("embedding", r"model\.embed_tokens\."),
    ("head", r"lm_head\."),
    ("attention", r".*\.self_attn\."),
    ("shared_experts", r".*\.mlp\.shared_experts\."),
    ("routed_experts", r".*\.mlp\.experts\."),
    ("gate", r".*\.mlp\.gate\."),
    ("dense_mlp", r".*\.mlp\."),
    ("norms", r".*"),
)


def model_info(checkpoint: Checkpoint) -> dict[str, Any]:
    """Facts about `checkpoint` as plain data, ready for JSON."""
    args = checkpoint.args
    parameters = parameters_by_part(args)
    bits = exact.softmax_bits(args.max_kv_rows)
    return {
        "path": str(checkpoint.path),
        "parameters": parameters,
        "parameters_total": sum(parameters.values()),
        "parameters_active_per_token": active_parameters(args),
        "layers": {
            "dense": args.first_k_dense_replace,
            "moe": args.num_moe_layers,
            "mtp": args.num_nextn_predict_layers,
        },
        "experts": {
            "routed": args.n_routed_experts,
            "chosen_per_token": args.num_experts_per_tok,
            "shared": args.n_shared_experts,
            "groups": args.n_group,
            "groups_kept": args.topk_group,
        },
        "kv_bytes_per_token": kv_bytes_per_token(args),
        "kv_bytes_per_token_layer": args.kv_width * 4,
        "hidden_row_bytes": {"int8_with_scale": args.hidden_size + 4, "f32": 4 * args.hidden_size},
        "max_positions": args.max_position_embeddings,
        "bit_budget": {
            "softmax_fraction_bits": bits,
            "kv_magnitude_bits": exact.KV_MAGNITUDE_BITS,
            "max_exact_context": exact.softmax_max_rows(bits),
        },
        "layout": {
            "format": "safetensors, DeepSeek-V3 names",
            "storage_types": sorted({tensor.dtype for tensor in checkpoint.stored.values()}),
            "tensors": len(tensor_shapes(args)),
            "unused_tensors": sorted(set(checkpoint.stored) - _used_names(checkpoint)),
        },
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in checkpoint.files
        },
    }


def parameters_by_part(args: ModelArgs) -> dict[str, int]:
    """Parameters of each part of the main model; all MTP layers together are one part."""
    counts = dict.fromkeys([name for name, _ in _PARTS] + ["mtp"], 0)
    for name, shape in tensor_shapes(args).items():
        counts[_part_of(args, name)] += math.prod(shape)
    return counts


def active_parameters(args: ModelArgs) -> int:
    """Parameters that one token of the main model is multiplied with, head included.

    The embedding is looked up, not multiplied, and MTP layers only draft: neither counts.
    """
    counts = parameters_by_part(args)
    idle = args.n_routed_experts - args.num_experts_per_tok
    routed = counts["routed_experts"] // args.n_routed_experts
    total = sum(counts.values()) - counts["mtp"] - idle * routed
    return total if args.tie_word_embeddings else total - counts["embedding"]


def kv_bytes_per_token(args: ModelArgs) -> int:
    """Bytes of latent KV that one token leaves behind in all layers, MTP included, as stored."""
    return args.num_kv_layers * args.kv_width * 4


def file_sha256(path: Path) -> str:
    """SHA-256 of one file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _part_of(args: ModelArgs, name: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None and int(layer.group(1)) >= args.num_hidden_layers:
        return "mtp"
    return next(part for part, pattern in _PARTS if re.match(pattern, name))


def _used_names(checkpoint: Checkpoint) -> set[str]:
    names = set(tensor_shapes(checkpoint.args))
    return names | {f"{name}_scale_inv" for name in names}
