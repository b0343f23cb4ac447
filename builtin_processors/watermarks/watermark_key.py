"""The operator's secret, from which everything random of a watermark is derived."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

NO_KEY = "this server has no watermark key: its operator sets one with --watermark-key-file"
"""Reason why a request for a watermark is refused."""
MIN_KEY_BYTES = 16
"""Shorter secrets can be guessed."""


@dataclass(frozen=True)
class WatermarkKey:
    """A secret. The same secret marks and detects; each use of it derives integers of its own.

    Attributes:
        secret: at least `MIN_KEY_BYTES` bytes.

    Raises:
        ValueError: it is too short.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_KEY_BYTES:
            raise ValueError(f"a watermark key has at least {MIN_KEY_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def read(cls, path: str) -> WatermarkKey:
        """Read the secret in a file, without the white space around it.

        Raises:
            ValueError: the file cannot be read, or the secret is too short; names the file.
        """
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"watermark_key_file: {path} cannot be read: {error.strerror}") from None
        try:
            return cls(secret)
        except ValueError as error:
            raise ValueError(f"watermark_key_file: {path}: {error}") from None

    def integer(self, purpose: str, data: bytes = b"", *, bits: int = 62) -> int:
        """Derive an integer below 2 ** bits with keyed BLAKE2b (RFC 7693).

        Args:
            purpose: what it is for; at most 16 characters.
            data: what it depends on.
            bits: at most 512.
        """
        digest = hashlib.blake2b(data, key=self._key, person=purpose.encode()).digest()
        return int.from_bytes(digest, "little") % (1 << bits)

    @property
    def hashing_key(self) -> int:
        """The `hashing_key` of transformers' `WatermarkingConfig`, for green lists of the scheme `lefthash`."""
        return self.integer("kgw-hashing-key")

    def synthid_keys(self, depth: int) -> list[int]:
        """Return the `keys` of transformers' `SynthIDTextWatermarkingConfig`, one for each layer of the tournament."""
        return [self.integer("synthid-keys", layer.to_bytes(4, "little")) for layer in range(depth)]

    @property
    def sampling_table_seed(self) -> int:
        """The `sampling_table_seed` of transformers' `SynthIDTextWatermarkingConfig`."""
        return self.integer("synthid-table", bits=32)

    @cached_property
    def _key(self) -> bytes:
        return hashlib.sha512(self.secret).digest()
