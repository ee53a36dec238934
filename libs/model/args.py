"""The shape of a model: a checkpoint's `config.json`, checked, under DeepSeek's field names.

`ModelArgs` is plain data. Everything that sizes something (tensors, KV blocks, bytes on the wire)
asks it. It covers the DeepSeek-V3 family: MLA, a dense prefix, then MoE layers with a sigmoid gate
whose choice is corrected by a bias and limited to expert groups, plus MTP layers behind the main
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from libs.errors import BadInput

Number = TypeVar("Number", int, float)

# What this engine computes; a checkpoint that asks for something else is refused, not approximated.
SUPPORTED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rope_interleave": True,
    "attention_bias": False,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN: how positions beyond the trained window are squeezed into it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """One model's sizes and switches. `num_nextn_predict_layers` counts the MTP layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kv_width(self) -> int:
        """Numbers in one latent KV row: `kv_lora_rank + qk_rope_head_dim`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep KV rows: main layers, then MTP layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def max_kv_rows(self) -> int:
        """KV rows a sequence may reach: its positions, and drafts beyond the last (two, P083)."""
        return self.max_position_embeddings + max(2, self.num_nextn_predict_layers) + 1

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the main model (MTP layers not counted)."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def shared_expert(self) -> int | None:
        """The id by which the shared expert is addressed, after the routed ones."""
        return self.n_routed_experts if self.n_shared_experts else None

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has experts; MTP layers (from `num_hidden_layers` on) always have."""
        assert 0 <= layer < self.num_kv_layers, layer
        return layer >= self.first_k_dense_replace

    def expert_ids(self) -> tuple[int, ...]:
        """Every expert of a MoE layer: the routed ones, then the shared one."""
        return tuple(range(self.n_routed_experts + (1 if self.n_shared_experts else 0)))

    def expert_intermediate_size(self, expert: int) -> int:
        """Inner width of one expert; the shared one is as wide as `n_shared_experts` routed."""
        assert expert in self.expert_ids(), expert
        if expert == self.shared_expert:
            return self.moe_intermediate_size * self.n_shared_experts
        return self.moe_intermediate_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Read and check a `config.json`; `BadInput` names the first field that is wrong."""
        read = _Fields(config)
        read.check_supported()
        heads = read.integer("num_attention_heads")
        args = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_nextn_predict_layers=read.integer("num_nextn_predict_layers", 0, minimum=0),
            num_attention_heads=heads,
            q_lora_rank=read.integer("q_lora_rank") if config.get("q_lora_rank") else None,
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
            n_routed_experts=read.integer("n_routed_experts"),
            n_shared_experts=read.integer("n_shared_experts", 0, minimum=0),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            n_group=read.integer("n_group", 1),
            topk_group=read.integer("topk_group", 1),
            first_k_dense_replace=read.integer("first_k_dense_replace", 0, minimum=0),
            norm_topk_prob=read.boolean("norm_topk_prob", True),
            routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=read.rope_theta(),
            rope_scaling=read.rope_scaling(),
            max_position_embeddings=read.integer("max_position_embeddings"),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            bos_token_id=read.token("bos_token_id"),
            eos_token_ids=read.tokens("eos_token_id"),
        )
        args._check_consistency()
        return args

    def _check_consistency(self) -> None:
        """Refuse sizes that contradict each other."""
        experts_in_reach = self.topk_group * (self.n_routed_experts // self.n_group)
        rules = (
            ("qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "must be even"),
            ("n_group", self.n_routed_experts % self.n_group == 0,
             f"must divide n_routed_experts ({self.n_routed_experts})"),
            ("n_group", self.n_group == 1 or self.n_routed_experts // self.n_group >= 2,
             "leaves fewer than two experts in a group"),
            ("topk_group", self.topk_group <= self.n_group,
             f"must not exceed n_group ({self.n_group})"),
            ("num_experts_per_tok", self.num_experts_per_tok <= experts_in_reach,
             f"must not exceed the {experts_in_reach} experts of topk_group groups"),
            ("first_k_dense_replace", self.first_k_dense_replace <= self.num_hidden_layers,
             f"must not exceed num_hidden_layers ({self.num_hidden_layers})"),
        )  # fmt: skip
        for name, holds, why in rules:
            if not holds:
                raise BadInput(f"config.json: {name} {why}", field=name)


class _Fields:
    """Typed access to one `config.json`, with errors that name the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def check_supported(self) -> None:
        for name, wanted in SUPPORTED.items():
            found = self._config.get(name, wanted)
            if found != wanted:
                raise BadInput(
                    f"config.json: {name} is {found!r}; only {wanted!r} is supported", field=name
                )
        heads, kv_heads = (
            self._config.get("num_attention_heads"),
            self._config.get("num_key_value_heads"),
        )
        if kv_heads is not None and kv_heads != heads:
            raise BadInput(
                f"config.json: num_key_value_heads is {kv_heads!r}; latent attention needs one per "
                f"attention head ({heads!r})",
                field="num_key_value_heads",
            )

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._config.get(name, default)
        if value is None:
            raise BadInput(f"config.json: {name} is missing", field=name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise BadInput(
                f"config.json: {name} must be an integer of at least {minimum}, not {value!r}",
                field=name,
            )
        return value

    def number(self, name: str, default: float) -> float:
        return _positive(name, self._config.get(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise BadInput(f"config.json: {name} must be true or false, not {value!r}", field=name)
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._config.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        vocab = self.integer("vocab_size")
        for token in listed:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise BadInput(
                    f"config.json: {name} must be a token id below {vocab}, not {token!r}",
                    field=name,
                )
        return tuple(listed)

    def token(self, name: str) -> int | None:
        listed = self.tokens(name)
        return listed[0] if listed else None

    def rope_theta(self) -> float:
        nested = self._rope_table().get("rope_theta")
        return _positive("rope_theta", self._config.get("rope_theta", nested or 10_000.0))

    def rope_scaling(self) -> RopeScaling | None:
        table = self._rope_table()
        kind = table.get("rope_type", table.get("type", "default"))
        match kind:
            case "default":
                return None
            case "yarn":
                pass
            case _:
                raise BadInput(
                    f"config.json: rope_scaling.type is {kind!r}; only 'yarn' is supported",
                    field="rope_scaling.type",
                )
        if "factor" not in table:
            raise BadInput(
                "config.json: rope_scaling.factor is missing", field="rope_scaling.factor"
            )
        window = table.get("original_max_position_embeddings")
        return RopeScaling(
            factor=_positive("rope_scaling.factor", table["factor"]),
            original_max_position_embeddings=int(
                _positive(
                    "rope_scaling.original_max_position_embeddings",
                    window if window is not None else self.integer("max_position_embeddings"),
                )
            ),
            beta_fast=_positive("rope_scaling.beta_fast", table.get("beta_fast") or 32.0),
            beta_slow=_positive("rope_scaling.beta_slow", table.get("beta_slow") or 1.0),
            mscale=float(table.get("mscale") or 0.0),
            mscale_all_dim=float(table.get("mscale_all_dim") or 0.0),
        )

    def _rope_table(self) -> Mapping[str, Any]:
        # `rope_scaling` in published checkpoints, `rope_parameters` as transformers 5 writes it.
        table = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not isinstance(table, Mapping):
            raise BadInput("config.json: rope_scaling must be an object", field="rope_scaling")
        return table


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadInput(f"config.json: {name} must be a positive number, not {value!r}", field=name)
    return float(value)
