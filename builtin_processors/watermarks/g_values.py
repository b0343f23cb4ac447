"""g-values: pseudorandom bits of each token after a context, one for each layer of SynthID's tournament.

The same as those of transformers' `SynthIDTextWatermarkLogitsProcessor` on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.device_tensor import copies_to

from .watermark_key import WatermarkKey

TABLE_SIZE = 1 << 16
"""transformers' `sampling_table_size`."""
MULTIPLIER = 6364136223846793005
"""The multiplier of Knuth's linear congruential generator modulo 2 ** 64, whose increment is 1."""
_BITS = 64


class GValues:
    """The g-values of a key.

    A hash of context and token, and then of each layer's key, is an index into a table of random bits.

    Args:
        key: the secret.
        depth: number of layers.
    """

    def __init__(self, key: WatermarkKey, depth: int) -> None:
        self._keys = np.array(key.synthid_keys(depth), dtype=np.int64)
        generator = torch.Generator().manual_seed(key.sampling_table_seed)
        self._table = torch.randint(0, 2, (TABLE_SIZE,), generator=generator)
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def of_tokens(self, context_hashes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the g-values of some tokens of each row, float32 [depth, rows, tokens].

        Args:
            context_hashes: int64 [rows].
            tokens: int64 [rows, tokens].
        """
        keys, table = self._tensors_on(tokens.device)
        hashes = (context_hashes.unsqueeze(1) + tokens).mul_(MULTIPLIER).add_(1)
        indices = (hashes + keys[:, None, None]).mul_(MULTIPLIER).add_(1).bitwise_and_(TABLE_SIZE - 1)
        return table[indices]

    def table_indices(self, context_hashes: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the index of each bit in the table, int64 [tokens, depth], for a token after each context."""
        pairs = zip(context_hashes, tokens, strict=True)
        hashes = np.array([hash_of([token], context) for context, token in pairs], dtype=np.int64)
        return ((hashes[:, None] + self._keys) * MULTIPLIER + 1) & (TABLE_SIZE - 1)

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """The random bits, int64 [`TABLE_SIZE`]."""
        return self._table.numpy()

    def _tensors_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._on_device is None or self._on_device[0].device != device:
            to_device = copies_to(device)
            self._on_device = to_device(self._keys), to_device(self._table.float().numpy())
        return self._on_device


def hash_of(tokens: Iterable[int], start: int = 1) -> int:
    """Return the hash of tokens, as a signed integer of 64 bits.

    Args:
        tokens: what is hashed, in order.
        start: the hash of the tokens before.
    """
    value = start
    for token in tokens:
        value = (value + token) * MULTIPLIER + 1
    value %= 1 << _BITS
    return value - (1 << _BITS) if value >> (_BITS - 1) else value
