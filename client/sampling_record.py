"""The record of how tokens were sampled, which a trainer replays: see `logitship.client.replay`. Needs NumPy."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1
KEPT, REMOVED, BITS = range(3)
"""Forms of a mask: the ids of the tokens that could be sampled, those of all others, or a bit for each token."""

ADD, SCALE, SET, REPETITION = range(4)
"""Kinds of edits: add to logits, multiply them, replace them, or divide positive ones and multiply the others."""

Tokens = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a record's token ids and lengths: little-endian, 2 bytes if these suffice, else 4."""
    return np.dtype("<u2" if vocab_size < 2**16 else "<u4")


@dataclass(frozen=True)
class SamplingEdits:
    """Edits of the model's logits, before the temperature: those of the first token, in order, then the next one's.

    Attributes:
        positions: int64 [m]: index of the output token of each edit, ascending.
        kinds: uint8 [m]: `ADD`, `SCALE`, `SET` or `REPETITION`.
        lengths: int64 [m]: number of tokens whose logits it edits; 0: all.
        tokens: int64 [any]: these tokens, one edit after the other.
        values: float32 [any]: of `ADD` and `SET` one for each token, if they name tokens; of others one.
    """

    positions: Tokens
    kinds: npt.NDArray[np.uint8]
    lengths: Tokens
    tokens: Tokens
    values: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.positions)

    @classmethod
    def none(cls) -> SamplingEdits:
        """Return no edits."""
        integers = np.empty(0, np.int64)
        return cls(integers, np.empty(0, np.uint8), integers, integers, np.empty(0, np.float32))

    @classmethod
    def join(cls, parts: Sequence[SamplingEdits]) -> SamplingEdits:
        """Return the edits of several parts, whose positions are those of one output."""
        names = [each.name for each in fields(cls)]
        return (
            cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names)) if parts else cls.none()
        )

    def shifted(self, count: int) -> SamplingEdits:
        """Return the same edits `count` tokens later."""
        return replace(self, positions=self.positions + count)

    @property
    def num_values(self) -> Tokens:
        """Number of values of each edit: int64 [m]."""
        is_of_token = ((self.kinds == ADD) | (self.kinds == SET)) & (self.lengths > 0)
        return np.where(is_of_token, self.lengths, 1)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ids: np.dtype[Any]) -> SamplingEdits:
        """Parse the `edits` of a record, whose token ids have this dtype."""
        return cls(
            _decoded(data, "positions", np.dtype("<u4")).astype(np.int64),
            _decoded(data, "kinds", np.dtype("u1")).astype(np.uint8),
            _decoded(data, "lengths", ids).astype(np.int64),
            _decoded(data, "tokens", ids).astype(np.int64),
            _decoded(data, "values", np.dtype("<f4")).astype(np.float32),
        )

    def to_json(self, ids: np.dtype[Any]) -> dict[str, str]:
        """Do the opposite."""
        return _encoded(
            {
                "positions": self.positions.astype("<u4"),
                "kinds": self.kinds,
                "lengths": self.lengths.astype(ids),
                "tokens": self.tokens.astype(ids),
                "values": self.values.astype("<f4"),
            }
        )


@dataclass(frozen=True)
class SamplingRecord:
    """Record of the sampling of an output's tokens, or of those of a part of it.

    The masks of all tokens are a compressed sparse matrix for each form: the ids of the first token's mask, then those
    of the second, and so on.

    Attributes:
        vocab_size: number of tokens of the vocabulary.
        token_ids: the output tokens, int64 [n].
        logprobs: float32 [n]: the log-probability (natural logarithm) of each under the distribution that it was
            sampled from.
        forms: uint8 [n]: form of each mask.
        lengths: int64 [n]: number of ids of each mask; 0 for `BITS`.
        kept: int64 [any]: the ids of the masks of form `KEPT`, the most likely token first.
        removed: int64 [any]: those of form `REMOVED`.
        bits: uint8 [any, ceil(vocab_size / 8)]: the masks of form `BITS`: set bits could be sampled, and the lowest bit
            of a byte is the first token.
        temperature: by which the logits were divided; 1 if the most likely tokens were taken.
        start: number of tokens of the output before these.
        edits: what was done to the model's logits of the tokens that could be sampled, if it was requested.
    """

    vocab_size: int
    token_ids: Tokens
    logprobs: npt.NDArray[np.float32]
    forms: npt.NDArray[np.uint8]
    lengths: Tokens
    kept: Tokens
    removed: Tokens
    bits: npt.NDArray[np.uint8]
    temperature: float = 1.0
    start: int = 0
    edits: SamplingEdits = field(default_factory=SamplingEdits.none)

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SamplingRecord:
        """Parse the `sampling_record` of an answer.

        Raises:
            ValueError: it is of a newer version, or not complete.
        """
        if data["version"] != VERSION:
            raise ValueError(f"sampling_record: version {data['version']}, and this logitship reads version {VERSION}")
        vocab_size = int(data["vocab_size"])
        ids, num_bytes = token_dtype(vocab_size), -(-vocab_size // 8)
        record = cls(
            vocab_size,
            _decoded(data, "token_ids", ids).astype(np.int64),
            _decoded(data, "logprobs", np.dtype("<f4")).astype(np.float32),
            _decoded(data, "forms", np.dtype("u1")).astype(np.uint8),
            _decoded(data, "lengths", ids).astype(np.int64),
            _decoded(data, "kept", ids).astype(np.int64),
            _decoded(data, "removed", ids).astype(np.int64),
            _decoded(data, "bits", np.dtype("u1")).astype(np.uint8).reshape(-1, num_bytes),
            float(data["temperature"]),
            int(data["start"]),
            SamplingEdits.from_json(data.get("edits", {}), ids),
        )
        lengths = {form: int(record.lengths[record.forms == form].sum()) for form in (KEPT, REMOVED)}
        num_bits = int((record.forms == BITS).sum())
        found = (len(record.logprobs), len(record.forms), len(record.lengths), len(record.kept), len(record.removed))
        edits = record.edits
        of_edits = (len(edits.kinds), len(edits.lengths), len(edits.tokens), len(edits.values))
        expected = (len(edits), len(edits), int(edits.lengths.sum()), int(edits.num_values.sum()))
        is_complete = (*found, len(record.bits)) == (*[len(record)] * 3, lengths[KEPT], lengths[REMOVED], num_bits)
        if not is_complete or of_edits != expected or (edits.positions >= len(record)).any():
            raise ValueError("sampling_record: its arrays do not match each other")
        return record

    @classmethod
    def from_lists(
        cls,
        vocab_size: int,
        token_ids: Sequence[int],
        masks: Sequence[Sequence[int]],
        logprobs: Sequence[float | Sequence[float]],
        temperature: float = 1.0,
    ) -> SamplingRecord:
        """Convert masks that a server returned as lists, as SGLang and vLLM do.

        Args:
            vocab_size: number of tokens of the vocabulary.
            token_ids: the output tokens.
            masks: for each of them the tokens that could be sampled.
            logprobs: for each its log-probability, or those of all tokens in its mask.
            temperature: the request's; 0 is taken as 1.
        """
        if not len(token_ids) == len(masks) == len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens, {len(masks)} masks and {len(logprobs)} log-probabilities")
        selected = [
            of[list(mask).index(token)] if isinstance(of, Sequence) else of
            for token, mask, of in zip(token_ids, masks, logprobs, strict=True)
        ]
        return cls(
            vocab_size,
            np.array(token_ids, np.int64),
            np.array(selected, np.float32),
            np.zeros(len(masks), np.uint8),
            np.array([len(mask) for mask in masks], np.int64),
            np.array([token for mask in masks for token in mask], np.int64),
            np.empty(0, np.int64),
            np.empty((0, -(-vocab_size // 8)), np.uint8),
            temperature or 1.0,
        )

    @classmethod
    def join(cls, records: Sequence[SamplingRecord]) -> SamplingRecord:
        """Return one record of the parts of an output, such as those of a stream's events, in order.

        Raises:
            ValueError: a part is missing, or there is none.
        """
        if not records:
            raise ValueError("no sampling records to join")
        ends = [record.start + len(record) for record in records]
        if [record.start for record in records[1:]] != ends[:-1]:
            raise ValueError("the sampling records do not follow each other: a part of the output is missing")
        names = ("token_ids", "logprobs", "forms", "lengths", "kept", "removed", "bits")
        arrays: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in records]) for name in names}
        edits = SamplingEdits.join([record.edits.shifted(record.start - records[0].start) for record in records])
        return replace(records[0], **arrays, edits=edits)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON: arrays are little-endian, in base64, and those without elements are left out."""
        ids = token_dtype(self.vocab_size)
        arrays = {
            "token_ids": self.token_ids.astype(ids),
            "logprobs": self.logprobs.astype("<f4"),
            "forms": self.forms,
            "lengths": self.lengths.astype(ids),
            "kept": self.kept.astype(ids),
            "removed": self.removed.astype(ids),
            "bits": self.bits,
        }
        return {
            "version": VERSION,
            "vocab_size": self.vocab_size,
            "temperature": self.temperature,
            "start": self.start,
            **_encoded(arrays),
            **({"edits": self.edits.to_json(ids)} if len(self.edits) else {}),
        }

    def could_be_sampled(self) -> npt.NDArray[np.bool_]:
        """Return which tokens could be sampled in place of each output token: bool [n, vocab_size]."""
        masks = np.zeros((len(self), self.vocab_size), bool)
        for form, ids in ((KEPT, self.kept), (REMOVED, self.removed)):
            rows = np.flatnonzero(self.forms == form)
            masks[rows] = form == REMOVED
            masks[np.repeat(rows, self.lengths[rows]), ids] = form == KEPT
        rows = np.flatnonzero(self.forms == BITS)
        masks[rows] = np.unpackbits(self.bits, axis=1, count=self.vocab_size, bitorder="little").astype(bool)
        return masks


def _encoded(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, str]:
    return {name: b64encode(array.tobytes()).decode() for name, array in arrays.items() if array.size}


def _decoded(data: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(b64decode(data.get(name, ""), validate=True), dtype)
