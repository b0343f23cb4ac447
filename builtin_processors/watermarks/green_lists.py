"""Green lists: pseudorandom parts of the vocabulary, one for each context (Kirchenbauer et al., arXiv:2301.10226).

`KeyedGreenLists` are logitship's own. `PermutedGreenLists` are those of transformers' `WatermarkLogitsProcessor`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.device_tensor import copies_to

from .watermark_key import WatermarkKey

_MAX_ELEMENTS = 1 << 22
"""Logits whose colors are computed at once: the temporary tensors of a large batch would take as much memory as it."""
_MAX_MASK_BYTES = 64 << 20
"""Bytes of the green lists that are kept, at one bit for each token."""


class GreenLists(Protocol):
    """Decides which tokens are green after a context."""

    def add_bias(
        self,
        logits: torch.Tensor,
        contexts: Sequence[Sequence[int]],
        ratios: Sequence[float],
        biases: Sequence[float],
    ) -> None:
        """Add a bias to the green tokens of each row, in place, without waiting for the device.

        Args:
            logits: float32 [rows, vocab].
            contexts: the last tokens of each row.
            ratios: expected part of the vocabulary that is green, of each row.
            biases: what is added, for each row.
        """
        ...

    def are_green(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], ratio: float
    ) -> npt.NDArray[np.bool_]:
        """Return whether each token is green after its context, bool [tokens]."""
        ...


class KeyedGreenLists:
    """Green lists of contexts of any length: `a * table[token] + b` modulo 2 ** 32 is below `ratio * 2 ** 32`.

    The table is random, and the same for all contexts; `a`, which is odd, and `b` are derived from the context. All of
    them are derived from the whole key, unlike those of a generator with a seed of 32 bits, which can be searched. For
    each context the colors of two tokens are almost independent, as with any multiply-add-shift hash, and those of
    several contexts are independent. There is no list to shuffle or to keep: a row costs a multiplication, an addition
    and a comparison for each token, on the device of the logits. The colors do not depend on the device.

    Args:
        key: the secret.
    """

    def __init__(self, key: WatermarkKey) -> None:
        self._key = key
        self._table: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._on_device: torch.Tensor | None = None

    def add_bias(
        self,
        logits: torch.Tensor,
        contexts: Sequence[Sequence[int]],
        ratios: Sequence[float],
        biases: Sequence[float],
    ) -> None:
        """See `GreenLists.add_bias`."""
        num_rows, vocab_size = logits.shape
        to_device = copies_to(logits.device)
        numbers = np.empty((num_rows, 3), dtype=np.int32)
        numbers[:, :2] = self._factors(contexts)
        numbers[:, 2] = [_threshold(ratio) for ratio in ratios]
        factors, summands, thresholds = torch.split(to_device(numbers), 1, dim=1)
        added = to_device(np.array(biases, dtype=np.float32).reshape(-1, 1))
        zero = logits.new_zeros(())
        table = self._table_on(logits.device, vocab_size)
        step = max(1, _MAX_ELEMENTS // vocab_size)
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            hashes = torch.mul(table, factors[rows]).add_(summands[rows])
            logits[rows].add_(torch.where(hashes < thresholds[rows], added[rows], zero))

    def are_green(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], ratio: float
    ) -> npt.NDArray[np.bool_]:
        """See `GreenLists.are_green`."""
        numbers = self._factors(contexts)
        found = self._token_hashes(max(tokens, default=-1) + 1)[np.asarray(tokens, dtype=np.int64)]
        green: npt.NDArray[np.bool_] = numbers[:, 0] * found + numbers[:, 1] < _threshold(ratio)
        return green

    def _factors(self, contexts: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
        """Return `a` and `b` of each context, int32 [contexts, 2]."""
        numbers = np.empty(len(contexts), dtype=np.uint64)
        for index, context in enumerate(contexts):
            numbers[index] = self._key.integer("kgw-context", np.asarray(context, dtype="<i8").tobytes(), bits=64) | 1
        return numbers.astype("<u8").view("<i4").astype(np.int32).reshape(-1, 2)

    def _table_on(self, device: torch.device, vocab_size: int) -> torch.Tensor:
        table = self._on_device
        if table is None or table.device != device or len(table) != vocab_size:
            table = self._on_device = copies_to(device)(self._token_hashes(vocab_size))
        return table

    def _token_hashes(self, size: int) -> npt.NDArray[np.int32]:
        """Return the random numbers of at least the first `size` tokens. They do not depend on the size."""
        if len(self._table) < size:
            # `random_raw` is the same in all versions of numpy, which the methods of its `Generator` need not be.
            raw = np.random.PCG64(self._key.integer("kgw-table", bits=128)).random_raw(size)
            self._table = (raw >> np.uint64(32)).astype(np.uint32).view(np.int32)
        return self._table[:size] if len(self._table) > size else self._table


def _threshold(ratio: float) -> int:
    """Return the least int32 that is not green."""
    return min(round(ratio * 2**32), 2**32 - 1) - 2**31


class PermutedGreenLists:
    """Green lists of the scheme `lefthash`, with a context of one token: the beginning of a random permutation.

    The same as those of transformers' `WatermarkLogitsProcessor` on a CPU, so that its `WatermarkDetector` finds the
    mark, given `WatermarkKey.hashing_key`. Of the seed, PyTorch's generator uses 32 bits.

    A permutation takes about a millisecond for 150,000 tokens, so the lists of the last contexts are kept.

    Args:
        key: the secret.
        vocab_size: number of columns of the logits.
    """

    def __init__(self, key: WatermarkKey, vocab_size: int) -> None:
        self._hashing_key = key.hashing_key
        self._vocab_size = vocab_size
        self._generator = torch.Generator()
        self._kept: OrderedDict[tuple[int, int], npt.NDArray[np.uint8]] = OrderedDict()
        self._max_kept = max(1, 8 * _MAX_MASK_BYTES // vocab_size)

    def add_bias(
        self,
        logits: torch.Tensor,
        contexts: Sequence[Sequence[int]],
        ratios: Sequence[float],
        biases: Sequence[float],
    ) -> None:
        """See `GreenLists.add_bias`."""
        to_device = copies_to(logits.device)
        added = to_device(np.array(biases, dtype=np.float32).reshape(-1, 1))
        zero = logits.new_zeros(())
        step = max(1, _MAX_ELEMENTS // self._vocab_size)
        for first in range(0, len(logits), step):
            rows = slice(first, first + step)
            masks = [
                self._mask(context[-1], ratio) for context, ratio in zip(contexts[rows], ratios[rows], strict=True)
            ]
            logits[rows].add_(torch.where(to_device(np.stack(masks)), added[rows], zero))

    def are_green(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], ratio: float
    ) -> npt.NDArray[np.bool_]:
        """See `GreenLists.are_green`."""
        pairs = zip(contexts, tokens, strict=True)
        return np.array([self._mask(context[-1], ratio)[token] for context, token in pairs], dtype=np.bool_)

    def _mask(self, last_token: int, ratio: float) -> npt.NDArray[np.bool_]:
        """Return the green tokens after a token, bool [vocab]."""
        size = int(self._vocab_size * ratio)
        wanted = last_token, size
        packed = self._kept.get(wanted)
        if packed is None:
            self._generator.manual_seed(self._hashing_key * last_token % (2**64 - 1))
            permutation = torch.randperm(self._vocab_size, generator=self._generator).numpy()
            mask = np.zeros(self._vocab_size, dtype=np.bool_)
            mask[permutation[:size]] = True
            packed = self._kept[wanted] = np.packbits(mask)
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(wanted)
        return np.unpackbits(packed, count=self._vocab_size).view(np.bool_)
