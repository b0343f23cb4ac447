"""Linear layers with weights packed for oneDNN, in huge pages."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import nn

_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")

# oneDNN compiles each multiplication for each number of rows and caches 1,024 of them, which takes 0.7 GB. 128 cover
# the usual numbers of rows; an evicted one takes 1 ms to compile. oneDNN and PyTorch's layer over it each have a cache,
# and read its capacity at their first multiplication.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")

_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
"""Linux 6.1 and later: move a range to huge pages now, regardless of the system's setting."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packing speeds up such weights here: float32 on a CPU, with PyTorch's oneDNN operators."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
    )


class PackedLinear:
    """Computes `x @ weight.T + bias`, and optionally adds a tensor in the same pass over the result.

    `torch.nn.functional.linear` multiplies a plain matrix. For a few rows, a CPU reads it at half the speed of its
    memory. oneDNN packs the weights once into blocks that fit the CPU's vector registers. PyTorch's compiler uses the
    same operators for frozen weights.

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
        """Return one layer that concatenates the outputs of several layers.

        Args:
            layers: the layers, all with a bias or none.
            scale: float32 [in], factors of the input.
        """
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers))
        return cls(weight if scale is None else weight * scale, torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute float32 [rows, in] to [rows, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Compute the same plus `other`, float32 [rows, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return product


def collapse(address: int, nbytes: int) -> int:
    """Move memory to huge pages, as far as the kernel supports it. Its content does not change.

    The CPU caches a few thousand address translations (TLB). With pages of 4 KiB these cover some megabytes, so reading
    all weights of a model in each step waits for page walks. A page of 2 MiB needs one translation.


    Args:
        address: start of the memory, in this process.
        nbytes: its size.

    Returns:
        Bytes in huge pages now. The first and last page may include neighboring memory. 0 if the kernel cannot do it.
    """
    if os.uname().sysname != "Linux" or not nbytes:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = address - address % _HUGE_PAGE
    # One by one, so that a page that cannot be moved, such as at the end of a mapping, does not affect the others.
    pages = range(first, address + nbytes, _HUGE_PAGE)
    moved = [page for page in pages if madvise(page, _HUGE_PAGE, _MADV_COLLAPSE) == 0]
    return _HUGE_PAGE * len(moved)
