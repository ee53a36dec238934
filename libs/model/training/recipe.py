"""The numbers of a training run, and how they change while it goes on.

Progress is a share from 0 to 1: of the steps when a number of steps is given (then a seed fixes
every weight), of the wall budget else (then the run ends on time on a noisy machine). The rates are
flat first and then fall to nothing; the router's bias is balanced as in DeepSeek-V3 and frozen
for the last part, so that a mild skew between experts remains for the load balancer to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libs.errors import BadInput
from libs.model.args import ModelArgs
from libs.model.training import markup
from libs.model.training.tokenizer_trainer import MODEL_MAX_LENGTH, VOCAB_SIZE

# The shipped model, as its `config.json`: 3.6 million parameters, two thirds of them in experts.
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": MODEL_MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "bos_token_id": markup.BOS_ID,
    "eos_token_id": markup.EOS_ID,
    "torch_dtype": "bfloat16",
}
MODEL_ARGS = ModelArgs.from_config(MODEL_CONFIG)

WARM_UP_STEPS = 40
FLAT_SHARE = 0.35
BALANCED_SHARE = 0.70
LR_FLOOR = 0.02  # of the full rate, so that the last steps still count


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a run lasts: exactly `steps`, or `seconds` of wall time when steps is 0."""

    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.seconds < 0 or (self.steps == 0) == (self.seconds == 0):
            raise BadInput("give either --steps or --minutes, above zero", field="steps")

    def progress(self, step: int, elapsed_s: float) -> float:
        """The share that is done, at least 1 when the run is over."""
        return step / self.steps if self.steps else elapsed_s / self.seconds


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a training run is made of; the shipped checkpoint was made with the defaults."""

    sequences: int = 12
    window: int = 256
    mtp_weight: float = 0.3
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.02
    adam_matrix_lr: float = 4e-3
    adam_vector_lr: float = 2e-3
    bias_step: float = 2e-3
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.sequences * self.window


def lr_scale(progress: float, step: int) -> float:
    """The share of the full learning rate at `progress`; `step` counts from 0 and warms up."""
    assert progress >= 0, progress
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    if progress < FLAT_SHARE:
        return warm
    return warm * max(LR_FLOOR, (1 - progress) / (1 - FLAT_SHARE))


def bias_scale(progress: float) -> float:
    """The share of the full bias step at `progress`: all, then a quarter, then none."""
    assert progress >= 0, progress
    if progress < FLAT_SHARE:
        return 1.0
    return 0.25 if progress < BALANCED_SHARE else 0.0
