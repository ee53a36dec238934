"""Checkpoints: every storage type, and one clear error for everything that may be wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.errors import BadInput
from libs.model.args import ModelArgs
from libs.model.weights import FP8_BLOCK, load_checkpoint, tensor_shapes
from tests.unit.model.checkpoints import (
    TINY,
    YARN,
    random_tensors,
    write_checkpoint,
    write_safetensors,
)


def test_the_shipped_checkpoint_has_two_mtp_layers_and_bf16_values() -> None:
    checkpoint = load_checkpoint()
    assert checkpoint.args.num_nextn_predict_layers == 2
    values = checkpoint.tensor("model.norm.weight")
    assert values.dtype == np.float32
    assert not (values.view(np.uint32) & 0xFFFF).any()
    assert checkpoint.stored["model.norm.weight"].dtype == "BF16"


def test_shards_and_single_file_hold_the_same(tmp_path: Path) -> None:
    single = load_checkpoint(write_checkpoint(tmp_path / "single"))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(TINY))
    names = list(single.stored)
    weight_map: dict[str, str] = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        chosen = {name: ("F32", single.tensor(name)) for name in names[part::3]}
        write_safetensors(sharded / file, chosen)
        weight_map |= dict.fromkeys(chosen, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = load_checkpoint(sharded)
    assert len(found.files) == 3
    assert all(np.array_equal(found.tensor(name), single.tensor(name)) for name in names)


def test_fp8_blocks_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    args = ModelArgs.from_config(TINY | {"hidden_size": 160})
    tensors = {name: ("F32", values) for name, values in random_tensors(args).items()}
    name = "model.layers.0.self_attn.o_proj.weight"
    codes = np.full((160, 36), 0x38, np.uint8)  # 1.0
    codes[0, 0], codes[0, 1], codes[0, 2] = 0x7E, 0x81, 0xC4  # 448, -2^-9, -3
    tensors[name] = ("F8_E4M3", codes)
    assert FP8_BLOCK == 128
    tensors[f"{name}_scale_inv"] = ("F32", np.array([[2.0], [0.5]], np.float32))
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_size": 160}))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    values = load_checkpoint(tmp_path).tensor(name)
    assert values[0, :4].tolist() == [896.0, -(2.0**-8), -6.0, 2.0]
    assert values[128:].tolist() == [[0.5] * 36] * 32


def test_a_wrong_shape_names_tensor_expected_and_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"moe_intermediate_size": 25}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"experts\.0\.gate_proj.*\[24, 48\], expected \[25, 48\]"):
        load_checkpoint(tmp_path)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    args = ModelArgs.from_config(TINY)
    tensors = {name: ("F32", values) for name, values in random_tensors(args).items()}
    del tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    write_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(BadInput, match=r"layers\.2.*correction_bias is missing.*\[8\]") as caught:
        load_checkpoint(tmp_path)
    assert caught.value.field == "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable|not a safetensors"),
        (b"\xff" * 64, "not a safetensors"),
        ((4).to_bytes(8, "little") + b"nope", "malformed safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "malformed safetensors header"),
        ((14).to_bytes(8, "little") + b'{"a":{"x":1}} ', "malformed safetensors header"),
    ],
)
def test_a_damaged_file_is_bad_input(tmp_path: Path, content: bytes, message: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load_checkpoint(tmp_path)


def test_a_truncated_file_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(BadInput, match=r"tensor model\.layers\.3.*needs \d+ bytes"):
        load_checkpoint(tmp_path)


def test_a_foreign_storage_type_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    values = np.zeros((4,), np.int64)
    write_safetensors(tmp_path / "model.safetensors", {"model.norm.weight": ("I64", values)})
    with pytest.raises(BadInput, match=r"model\.norm\.weight is stored as I64"):
        load_checkpoint(tmp_path)


def test_an_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="not a plain file name"):
        load_checkpoint(tmp_path)


def test_an_absent_folder_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json: no such file"):
        load_checkpoint(tmp_path / "nowhere")


def test_tied_embeddings_need_no_head() -> None:
    assert "lm_head.weight" not in tensor_shapes(
        ModelArgs.from_config(TINY | {"tie_word_embeddings": True})
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor"),
        ({"rope_scaling": YARN | {"factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": 8}, "rope_scaling"),
        ({"eos_token_id": 96}, "eos_token_id"),
    ],
)
def test_a_wrong_config_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=r"config\.json: ") as caught:
        ModelArgs.from_config(TINY | changes)
    assert caught.value.field == field


def test_both_spellings_of_rope_scaling_mean_the_same() -> None:
    old = ModelArgs.from_config(TINY | {"rope_scaling": YARN})
    table = {k: v for k, v in YARN.items() if k != "type"}
    nested = table | {"rope_type": "yarn", "rope_theta": 10000.0}
    new = {k: v for k, v in TINY.items() if k != "rope_theta"} | {"rope_parameters": nested}
    assert ModelArgs.from_config(new) == old
