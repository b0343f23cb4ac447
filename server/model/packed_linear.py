"""Linear layers whose weights lie in memory as oneDNN reads them."""

from __future__ import annotations

import os

import torch
from torch import nn

from .huge_pages import collapse

_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")

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
    """`x @ weight.T + bias`, and a sum that may follow it in the same pass over the result.

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
        collapse(torch.ops.mkldnn.data_ptr(self._weight), torch.ops.mkldnn._nbytes(self._weight))

    @classmethod
    def of(cls, *layers: nn.Linear, scale: torch.Tensor | None = None) -> PackedLinear:
        """One layer that gives the results of several, side by side.

        Args:
            scale: float32 [in], what the input is multiplied with before.
        """
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers))
        return cls(weight if scale is None else weight * scale, torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, in] to [rows, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The same, plus `other`, float32 [rows, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return product
