"""Agreement with the public implementation: Hugging Face's DeepSeek-V3, in float32.

Random tiny checkpoints cover the family's shapes, the shipped one covers trained weights. MTP runs
through `transformers`' own MTP model. Set `XDS_REQUIRE_ORACLE=1` to fail instead of skipping when
the `oracle` extra is not installed.
"""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.model.engine import Engine
from libs.model.kv import Span
from libs.model.reference import Reference, greedy
from libs.model.weights import SHIPPED, load_checkpoint
from tests.unit.model.checkpoints import YARN, random_tokens, write_checkpoint

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
REQUIRED = os.environ.get("XDS_REQUIRE_ORACLE") == "1"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        bool(MISSING) and not REQUIRED,
        reason=f"needs the oracle extra: {', '.join(MISSING)} not installed",
    ),
    # Third-party deprecations are not ours to fix.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

HF_FIELDS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "query_without_lora": {"q_lora_rank": None},
    "yarn": {"rope_scaling": YARN | {"mscale_all_dim": 1.0}},
    "yarn_unequal_mscales": {"rope_scaling": YARN},
    "one_group": {"n_group": 1, "topk_group": 1},
    "raw_weights": {"norm_topk_prob": False},
}


def public_model(folder: Path, *mtp_layers: int) -> Any:
    """Load a folder with transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    torch.set_num_threads(1)
    # The class expects the MTP tensors at DeepSeek-V3's own layer 61 and nowhere else.
    DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{layer}\..*" for layer in mtp_layers
    ]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def public_logits(model: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and final hidden states of one pass."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


def shipped_copy(folder: Path, *, second_mtp_layer: bool = False) -> Path:
    """The shipped checkpoint as an ordinary one, the second MTP layer left out or made a shard."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHIPPED / name, folder / name)
    if second_mtp_layer:
        shards = {"model.safetensors": "model-1.safetensors", "mtp2.safetensors": "mtp.safetensors"}
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        shutil.copy(SHIPPED / "mtp2.safetensors", folder / "mtp.safetensors")
        stored = load_checkpoint().stored
        index = {
            "metadata": {},
            "weight_map": {name: shards[t.path.name] for name, t in stored.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    return folder


def test_the_oracle_is_installed_where_it_is_required() -> None:
    assert not MISSING, f"XDS_REQUIRE_ORACLE=1, but {', '.join(MISSING)} not installed"


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_models_agree(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, 3, **HF_FIELDS, **VARIANTS[variant])
    ids = random_tokens(200, seed=1, vocab=96)
    wanted, _ = public_logits(public_model(folder, 3), ids)
    found = Reference(load_checkpoint(folder), "f32").prefill(ids)
    scale = float(np.abs(wanted).max())
    assert np.abs(found - wanted).max() < 2e-5 * scale
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


@pytest.mark.parametrize(("mode", "tolerance"), [("f32", 1e-4), ("fx", 0.02)])
def test_the_shipped_model_agrees(tmp_path: Path, mode: str, tolerance: float) -> None:
    folder = shipped_copy(tmp_path)
    ids = random_tokens(200, seed=2)
    wanted, _ = public_logits(public_model(folder, 6), ids)
    found = Reference(load_checkpoint(folder), mode).prefill(ids)
    assert np.abs(found - wanted).max() < tolerance
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_int8_agrees_on_nine_of_ten_tokens_of_short_texts(tmp_path: Path) -> None:
    folder = shipped_copy(tmp_path)
    reference = Reference(load_checkpoint(folder), "int8")
    golden = json.loads((SHIPPED.parent / "golden.json").read_text(encoding="utf-8"))
    model = public_model(folder, 6)
    same = []
    for case in golden["cases"].values():
        ids = case["prompt"] + case["modes"]["int8"]["tokens"]
        wanted, _ = public_logits(model, ids)
        same += list(reference.prefill(ids).argmax(-1) == wanted.argmax(-1))
    assert np.mean(same) > 0.9


def test_both_mtp_layers_agree(tmp_path: Path) -> None:
    """Order of the joined halves, rotary position `i + 1 + depth`, norm of what is recycled."""
    import torch
    from transformers.modeling_layers import MtpModel

    folder = shipped_copy(tmp_path, second_mtp_layer=True)
    ids = random_tokens(80, seed=4)
    model = public_model(folder, 6, 7)
    drafting = MtpModel.from_pretrained(model)
    engine = Engine(load_checkpoint(folder), "f32")
    _, public_hidden = public_logits(model, ids)
    kv = engine.contiguous_kv()
    _, hidden = engine.forward(ids, [Span(0, 0, len(ids))], kv)
    assert np.abs(hidden - public_hidden).max() < 1e-4
    recycled = torch.from_numpy(public_hidden)[None]
    for depth in range(2):
        count = len(ids) - 1 - depth
        following = ids[1 + depth :]
        with torch.no_grad():
            recycled = drafting.forward_layer(
                depth,
                recycled[:, :count],
                torch.arange(1 + depth, len(ids))[None],
                None,
                input_ids=torch.tensor([following]),
            )
            wanted = model.lm_head(recycled)[0].numpy()
        found, hidden = engine.mtp_forward(
            depth, hidden[:count], following, [Span(0, 0, count)], kv
        )
        assert np.abs(found - wanted).max() < 2e-4
        assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_speculative_generation_gives_the_public_tokens(tmp_path: Path) -> None:
    import torch

    folder = shipped_copy(tmp_path)
    model = public_model(folder, 6)
    prompt = [1, 3, *random_tokens(12, seed=5)]
    with torch.no_grad():
        public = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, use_mtp=True
        )[0].tolist()
    reference = Reference(load_checkpoint(folder), "f32")
    drafted = reference.speculate(prompt, 24, {2}, drafts=1)
    assert list(drafted.tokens) == public[len(prompt) :]
    assert list(drafted.tokens) == reference.generate(prompt, greedy, 24, {2})
