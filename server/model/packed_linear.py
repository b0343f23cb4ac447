"""Linear layers whose weights lie in memory as oneDNN reads them."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import nn

_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")

# oneDNN compiles each multiplication for each number of rows, and keeps 1,024 of them, which take 0.7 GB once a server
# has seen that many. These are enough for the numbers of rows that come again; one that is gone takes 1 ms to compile.
# Both oneDNN and PyTorch's layer over it keep them, and ask how many when they first multiply.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")

_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
"""Linux 6.1 and later: move a range to huge pages now, whatever the system's own habit is."""


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


def collapse(address: int, nbytes: int) -> int:
    """Move memory to huge pages, as far as the kernel does that. What stands there stays.

    The processor looks up where each page lies before it can read it, and keeps a few thousand of these translations.
    With pages of 4 KiB that covers some megabytes, and reading the weights of a model waits for lookups again and
    again. One page of 2 MiB needs one.


    Args:
        address: of memory of this process.
        nbytes: how much of it.

    Returns:
        How many bytes, from the first to the last huge page, lie in huge pages now. The ends may share theirs with what
        stands beside them. 0 where the kernel knows nothing of this.
    """
    if os.uname().sysname != "Linux" or not nbytes:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = address - address % _HUGE_PAGE
    # One by one: a page that cannot be had, at the border of a mapping, say, should not keep the others from it.
    pages = range(first, address + nbytes, _HUGE_PAGE)
    moved = [page for page in pages if madvise(page, _HUGE_PAGE, _MADV_COLLAPSE) == 0]
    return _HUGE_PAGE * len(moved)
