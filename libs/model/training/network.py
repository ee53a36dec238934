"""The model as one torch module, for training and judging only; serving never imports this file.

Modules carry DeepSeek's parameter names; only the expert stacks are cut up on export. MTP layers
stand behind the main ones in `model.layers`, as in the public layout.

Shapes: tokens `[rows, length]`, hidden `[rows, length, hidden]`.
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-subclassing-any

from __future__ import annotations

from libs.errors import BadInput
from libs.model.args import ModelArgs
from libs.model.training.layers import Attention, Mlp, Moe, RmsNorm, linear
from libs.model.training.torch_extra import F, Tensor, nn, torch


class Layer(nn.Module):
    """One transformer layer; dense for the first `first_k_dense_replace`, MoE after."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(args.hidden_size, args.rms_norm_eps)
        self.self_attn = Attention(args)
        self.post_attention_layernorm = RmsNorm(args.hidden_size, args.rms_norm_eps)
        moe = args.is_moe(layer)
        self.mlp = Moe(args) if moe else Mlp(args.hidden_size, args.intermediate_size)

    def forward(self, x: Tensor, start: int, memory: Tensor | None = None) -> Tensor:
        seen = None if memory is None else self.input_layernorm(memory)
        x = x + self.self_attn(self.input_layernorm(x), start, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedHead(nn.Module):
    """The norm of an MTP layer before the head that it shares with the main model."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.norm = RmsNorm(args.hidden_size, args.rms_norm_eps)


class MtpLayer(Layer):
    """A layer that joins a hidden row with the embedding of the token that followed it."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__(args, layer)
        self.enorm = RmsNorm(args.hidden_size, args.rms_norm_eps)
        self.hnorm = RmsNorm(args.hidden_size, args.rms_norm_eps)
        self.eh_proj = linear(2 * args.hidden_size, args.hidden_size)
        self.shared_head = SharedHead(args)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input: embedding half first, as in the public weights."""
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))


class Backbone(nn.Module):
    """Embedding, main layers, MTP layers and the final norm, under the public names."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        main = [Layer(args, layer) for layer in range(args.num_hidden_layers)]
        mtp = [MtpLayer(args, layer) for layer in range(args.num_hidden_layers, args.num_kv_layers)]
        self.layers = nn.ModuleList([*main, *mtp])
        self.norm = RmsNorm(args.hidden_size, args.rms_norm_eps)


class Network(nn.Module):
    """A DeepSeek-V3 with its MTP layers; `args` says how many of each."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        _check_trainable(args)
        self.args = args
        self.model = Backbone(args)
        self.lm_head = linear(args.hidden_size, args.vocab_size, gain=0.05)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The main model's rows behind the final norm, `[rows, length, hidden]`."""
        x = self._embed(tokens)
        for layer in self.model.layers[: self.args.num_hidden_layers]:
            x = layer(x, start=0)
        return self.model.norm(x)

    def mtp_hidden(self, depth: int, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """Rows of MTP layer `depth`: `hidden` of the layer before it, `next_tokens` one ahead.

        Row i of depth 0 stands at position i + 1 and predicts token i + 2; each depth adds one.
        """
        assert hidden.shape[:2] == next_tokens.shape, (hidden.shape, next_tokens.shape)
        layer = self.mtp_layer(depth)
        joined = layer.join(hidden, self._embed(next_tokens))
        return layer.shared_head.norm(layer(joined, start=depth + 1))

    def mtp_reused(self, hidden: Tensor, mtp_hidden: Tensor, tokens: Tensor) -> Tensor:
        """Rows of the first MTP layer run a second time, on its own output.

        Args: `hidden [rows, n, hidden]` of the main model, `mtp_hidden` of depth 0 (same shape) and
        `tokens [rows, n + 2]`. The second run sees the keys of the first one, which come from the
        main model's rows, as a server does that keeps one cache per layer.
        """
        length = hidden.shape[1]
        assert tokens.shape[1] == length + 2, (tokens.shape, length)
        layer = self.mtp_layer(0)
        memory = layer.join(hidden, self._embed(tokens[:, 1:-1]))
        joined = layer.join(mtp_hidden, self._embed(tokens[:, 2:]))
        return layer.shared_head.norm(layer(joined, start=2, memory=memory))

    def mtp_layer(self, depth: int) -> MtpLayer:
        """MTP layer `depth`, counted from 0."""
        assert 0 <= depth < self.args.num_nextn_predict_layers, depth
        layer = self.model.layers[self.args.num_hidden_layers + depth]
        assert isinstance(layer, MtpLayer), type(layer)
        return layer

    def moes(self) -> dict[int, Moe]:
        """The MoE part of every layer that has one, MTP layers included, by layer number."""
        parts = enumerate(self.model.layers)
        return {number: layer.mlp for number, layer in parts if isinstance(layer.mlp, Moe)}

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        # Autocast leaves an embedding in float32, and the residual stream would follow it.
        return x.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else x


def _check_trainable(args: ModelArgs) -> None:
    """Refuse variants of the architecture that serving knows and training does not."""
    for name, holds in (
        ("q_lora_rank", args.q_lora_rank is not None),
        ("rope_scaling", args.rope_scaling is None),
        ("tie_word_embeddings", not args.tie_word_embeddings),
        ("n_shared_experts", args.n_shared_experts > 0),
        ("num_nextn_predict_layers", args.num_nextn_predict_layers > 0),
    ):
        if not holds:
            raise BadInput(f"training does not support this {name}", field=name)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per token, computed in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.reshape(-1))
