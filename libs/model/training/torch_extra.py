"""The one place that imports torch, so that its absence is explained in one sentence."""

try:
    import torch
    import torch.nn.functional as F  # noqa: N812 - the name under which torch users know it
    from torch import nn
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "training needs torch: pip install 'xdeepserve[train]'", name=missing.name
    ) from missing

Tensor = torch.Tensor

__all__ = ["F", "Tensor", "nn", "torch"]
