"""The parts of a layer as torch modules: norm, rotary positions, latent attention, experts.

The same mathematics as `libs.model` in the form that learns fastest: attention is expanded, not
absorbed, and all experts of a layer are one stack that runs as two batched products.

Shapes: hidden `[rows, length, hidden]`; inside a mixture of experts `[tokens, hidden]`.
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-subclassing-any

from __future__ import annotations

import math

from libs.model.args import ModelArgs
from libs.model.training.torch_extra import F, Tensor, nn, torch

# The class default of the public implementation; `rms_norm_eps` is not used for the low-rank norms.
LOW_RANK_EPS = 1e-6
# Rows that an expert takes in training, over the mean; more are dropped. Only a router that is not
# balanced yet drops any, and a fixed size keeps the products regular.
TRAINING_CAPACITY = 2.25
_LOSING_SCORE = -1e9  # of experts outside the chosen groups


def linear(inputs: int, outputs: int, gain: float = 0.5) -> nn.Linear:
    """A matrix without bias whose outputs have `gain` times the size of its inputs."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


class RmsNorm(nn.Module):
    """Scales each row to unit mean square, in float32, then by a learnt weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Rope(nn.Module):
    """Rotates pairs (even, odd) by position; puts all even halves before all odd ones."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        exponents = torch.arange(0, args.qk_rope_head_dim, 2).float() / args.qk_rope_head_dim
        positions = torch.arange(args.max_position_embeddings).float()
        angles = torch.outer(positions, args.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """`x [..., length, rope]`, whose first row stands at position `start`."""
        rows = slice(start, start + x.shape[-2])
        cos, sin = self.cos[rows].to(x.dtype), self.sin[rows].to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head latent attention: keys and values of all heads out of one short row per token."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        assert args.q_lora_rank is not None
        self.args = args
        heads, hidden = args.num_attention_heads, args.hidden_size
        self.q_a_proj = linear(hidden, args.q_lora_rank)
        self.q_a_layernorm = RmsNorm(args.q_lora_rank, LOW_RANK_EPS)
        self.q_b_proj = linear(args.q_lora_rank, heads * args.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, args.kv_width)
        self.kv_a_layernorm = RmsNorm(args.kv_lora_rank, LOW_RANK_EPS)
        inner = args.qk_nope_head_dim + args.v_head_dim
        self.kv_b_proj = linear(args.kv_lora_rank, heads * inner)
        self.o_proj = linear(heads * args.v_head_dim, hidden, gain=0.15)
        self.rope = Rope(args)

    def forward(self, x: Tensor, start: int, memory: Tensor | None = None) -> Tensor:
        """Attends causally; `x [rows, length, hidden]` starts at position `start`.

        With `memory [rows, length, hidden]`, whose row i stands one position before row i of `x`,
        row i sees memory rows 0..i and itself, and nothing else of `x`.
        """
        rows, length, _ = x.shape
        args = self.args
        queries = self._queries(x, start)
        keys, values = self._keys_values(x, start)
        mask = None
        if memory is not None:
            assert memory.shape == x.shape, (memory.shape, x.shape)
            old_keys, old_values = self._keys_values(memory, start - 1)
            keys = torch.cat([old_keys, keys], dim=2)
            values = torch.cat([old_values, values], dim=2)
            past = torch.ones(length, length, dtype=torch.bool).tril()
            mask = torch.cat([past, torch.eye(length, dtype=torch.bool)], dim=1)
        # Equal widths let the fused kernel run; the padding is cut off again.
        values = F.pad(values, (0, args.qk_head_dim - args.v_head_dim))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None,
            scale=args.qk_head_dim**-0.5,
        )[..., : args.v_head_dim]  # fmt: skip
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))

    def _queries(self, x: Tensor, start: int) -> Tensor:
        """`[rows, heads, length, qk_head_dim]`."""
        args = self.args
        q = self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        content, position = q.split([args.qk_nope_head_dim, args.qk_rope_head_dim], dim=-1)
        return torch.cat([content, self.rope(position, start)], dim=-1)

    def _keys_values(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values, `[rows, heads, length, qk_head_dim]` and `[..., v_head_dim]`."""
        args = self.args
        latent, position = self.kv_a_proj_with_mqa(x).split(
            [args.kv_lora_rank, args.qk_rope_head_dim], dim=-1
        )
        both = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        content, values = both.split([args.qk_nope_head_dim, args.v_head_dim], dim=-1)
        rotated = self.rope(position[:, None], start).expand(-1, args.num_attention_heads, -1, -1)
        return torch.cat([content, rotated], dim=-1), values

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.args.num_attention_heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """A gated linear unit."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden, gain=0.15)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Chooses experts: sigmoid scores, a bias that only influences the choice, groups first."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.weight = nn.Parameter(torch.randn(args.n_routed_experts, args.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(args.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights, both `[tokens, top_k]`, for `x [tokens, hidden]`."""
        args = self.args
        per_group = args.n_routed_experts // args.n_group
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        choice = scores.detach() + self.e_score_correction_bias
        group_scores = choice.view(-1, args.n_group, per_group).topk(2, dim=-1).values.sum(-1)
        groups = group_scores.topk(args.topk_group, dim=-1).indices
        open_groups = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, groups, True)
        closed = ~open_groups.repeat_interleave(per_group, dim=1)
        chosen = choice.masked_fill(closed, _LOSING_SCORE)
        topk_idx = chosen.topk(args.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, topk_idx)
        if args.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return topk_idx, weights * args.routed_scaling_factor


class Experts(nn.Module):
    """All routed experts of a layer as two stacks: gate and up fused, and down."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        count, inner, hidden = args.n_routed_experts, args.moe_intermediate_size, args.hidden_size
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, hidden) * 0.5 / hidden**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, inner) * 0.15 / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x [experts, capacity, hidden]`, the rows that each expert takes."""
        gate, up = torch.bmm(x, self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2))


class Moe(nn.Module):
    """A mixture-of-experts layer; `load [experts]` counts the tokens of the last pass."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.gate = Gate(args)
        self.experts = Experts(args)
        shared = args.moe_intermediate_size * args.n_shared_experts
        self.shared_experts = Mlp(args.hidden_size, shared)
        self.load = torch.zeros(args.n_routed_experts, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            topk_idx, weights = self.gate(flat)
        return self._routed(flat, topk_idx, weights).view(x.shape) + self.shared_experts(x)

    def _routed(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts, `[tokens, hidden]`.

        Pairs (token, choice) are sorted by expert and laid into `[experts, capacity]` slots; a slot
        without a pair points behind the last one, where the weight is zero.
        """
        count, pairs = self.args.n_routed_experts, topk_idx.numel()
        experts = topk_idx.flatten()
        self.load = F.one_hot(experts, count).sum(0)
        mean = pairs / count
        capacity = int(TRAINING_CAPACITY * mean) if self.training else int(self.load.max())
        order = torch.argsort(experts, stable=True)
        owner = experts[order]
        rank = torch.arange(pairs) - (torch.cumsum(self.load, 0) - self.load)[owner]
        slot = torch.where(rank < capacity, owner * capacity + rank, count * capacity)
        pair = torch.full((count * capacity + 1,), pairs).index_copy(0, slot, order)[:-1]
        token = torch.where(pair < pairs, pair // topk_idx.shape[1], 0)
        weight = torch.cat([weights.flatten(), weights.new_zeros(1)]).index_select(0, pair)
        rows = x.index_select(0, token).view(count, capacity, -1)
        outputs = self.experts(rows).view(count * capacity, -1)
        weighted = outputs * weight[:, None].to(outputs.dtype)
        return torch.zeros_like(x, dtype=outputs.dtype).index_add(0, token, weighted)
