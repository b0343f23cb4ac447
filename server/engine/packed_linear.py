"""Linear layers whose weights lie in memory as oneDNN reads them."""

from __future__ import annotations

import os

import torch
from torch import nn

_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")

# oneDNN compiles each multiplication for each number of rows, and keeps 1,024 of them, which take 0.7 GB once a server
# has seen that many. These are enough for the numbers of rows that come again; one that is gone takes 1 ms to compile.
# Both oneDNN and PyTorch's layer over it keep them, and ask how many when they first multiply.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of that kind gain by it on this machine: float32 on a CPU for which PyTorch has oneDNN."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
    )


class PackedLinear:
    """`x @ weight.T + bias`, and what may follow it in the same pass over the result.

    `torch.nn.functional.linear` multiplies a plain matrix, which a CPU reads for a few rows at half the speed of its
    memory. oneDNN packs the weights into blocks, once, for the vector registers that there are. PyTorch's compiler uses
    the same operators for weights that it may freeze.

    Args:
        weight: float32 [out, in].
        bias: float32 [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = len(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().contiguous()

    @classmethod
    def of(cls, *layers: nn.Linear) -> PackedLinear:
        """One layer that gives the results of several, side by side."""
        weights: list[torch.Tensor] = [layer.weight for layer in layers]
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers))
        return cls(torch.cat(weights), torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, in] to [rows, out]."""
        return self._multiply(x, "none")

    def swish(self, x: torch.Tensor) -> torch.Tensor:
        """The same, then `y * sigmoid(y)`, also called SiLU."""
        return self._multiply(x, "swish")

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The same, plus `other`, float32 [rows, out]."""
        return self._combine(x, other, "add")

    def mul(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The same, times `other`, float32 [rows, out]."""
        return self._combine(x, other, "mul")

    def _multiply(self, x: torch.Tensor, then: str) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, then, [], "")
        return product

    def _combine(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, how)
        return product
