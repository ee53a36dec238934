"""Two optimisers side by side: Muon for matrices inside the layers, AdamW for all else.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so that every direction learns
at the same speed; a few Newton-Schulz steps in bfloat16 are close enough. Matrices of one shape,
and the experts of all layers, are orthogonalised together as one stack: the products are small, and
one big call costs a fraction of many small ones.
"""

# torch is an optional extra; a type checker that does not find it takes it for Any.
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libs.model.training.network import Network
from libs.model.training.recipe import Recipe, bias_scale, lr_scale
from libs.model.training.torch_extra import Tensor, nn, torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's coefficients: steep near zero
_NEWTON_SCHULZ_STEPS = 5
_ADAM_BETAS = (0.9, 0.95)
_ADAM_EPS = 1e-10
_ADAM_CLIP = 1.0


def orthogonalised(stack: Tensor) -> Tensor:
    """Roughly U V^T of every matrix in `stack [matrices, rows, columns]`."""
    a, b, c = _NEWTON_SCHULZ
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum, then orthogonalisation, for `[rows, columns]` or `[n, rows, columns]`."""

    def __init__(self, params: Sequence[nn.Parameter], recipe: Recipe) -> None:
        self._recipe = recipe
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in params:
            assert param.ndim in (2, 3), param.shape
            self._groups.setdefault(tuple(param.shape[-2:]), []).append(param)
        self._momentum = {
            shape: torch.zeros(sum(_count(param) for param in group), *shape)
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Updates every parameter at `scale` of the full rate, and forgets its gradient."""
        recipe = self._recipe
        rate = recipe.muon_lr * scale
        for (rows, columns), group in self._groups.items():
            gradient = torch.cat([param.grad.view(-1, rows, columns) for param in group])
            momentum = self._momentum[rows, columns]
            momentum.mul_(recipe.muon_momentum).add_(gradient)
            update = orthogonalised(gradient.add_(momentum, alpha=recipe.muon_momentum))
            # A tall matrix has more outputs than directions; keep the size of its output's change.
            update *= -rate * max(1.0, rows / columns) ** 0.5
            counts = [_count(param) for param in group]
            for param, part in zip(group, update.split(counts), strict=True):
                param.mul_(1 - rate * recipe.muon_weight_decay).add_(part.view_as(param))
                param.grad = None

    def state(self) -> dict[str, Any]:
        """What a later `restore` needs."""
        return {"momentum": self._momentum}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the momentum saved by `state`."""
        for shape, saved in state["momentum"].items():
            self._momentum[shape].copy_(saved)


def _count(param: nn.Parameter) -> int:
    return 1 if param.ndim == 2 else param.shape[0]


class Optimizer:
    """Muon, AdamW and the balancing of the routers' biases as one step."""

    def __init__(self, network: Network, recipe: Recipe) -> None:
        self._network = network
        self._recipe = recipe
        inner, other = split_parameters(network)
        self._muon = Muon(inner, recipe)
        self._other = other
        self._rates = [recipe.adam_matrix_lr, recipe.adam_vector_lr]
        groups = [
            {"params": [param for param in other if param.ndim >= 2]},
            {"params": [param for param in other if param.ndim < 2]},
        ]
        self._adam = torch.optim.AdamW(
            groups, betas=_ADAM_BETAS, eps=_ADAM_EPS, weight_decay=0.0, fused=True
        )

    def step(self, progress: float, step: int) -> None:
        """Applies the gradients and balances the routers, as far as the run has come."""
        scale = lr_scale(progress, step)
        torch.nn.utils.clip_grad_norm_(self._other, _ADAM_CLIP)
        self._muon.step(scale)
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._balance(self._recipe.bias_step * bias_scale(progress))

    @torch.no_grad()
    def _balance(self, size: float) -> None:
        """Raises the bias of underloaded experts and lowers that of overloaded ones by `size`."""
        if size == 0:
            return
        for moe in self._network.moes().values():
            load = moe.load.float()
            bias = moe.gate.e_score_correction_bias
            bias.add_(torch.sign(load.mean() - load), alpha=size)
            bias.sub_(bias.mean())

    def state(self) -> dict[str, Any]:
        """What a later `restore` needs."""
        return {"muon": self._muon.state(), "adam": self._adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the moments saved by `state`."""
        self._muon.restore(state["muon"])
        self._adam.load_state_dict(state["adam"])


def split_parameters(network: Network) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside the layers (for Muon), and embedding, head, routers and norms (for AdamW)."""
    inner: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    for name, param in network.named_parameters():
        outside = name.endswith((".mlp.gate.weight", "embed_tokens.weight", "lm_head.weight"))
        (other if param.ndim < 2 or outside else inner).append(param)
    return inner, other
