"""Replays sampling records in a trainer: log-probabilities as the sampler had them, from the trainer's own logits.

Needs PyTorch, and nothing of the server. `logitship.replay` is this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .sampling_record import ADD, BITS, KEPT, REMOVED, REPETITION, SCALE, SET, SamplingRecord


@dataclass(frozen=True)
class MaskEntries:
    """Entries of a sparse matrix of masks: token `ids[i]` at position (`rows[i]`, `columns[i]`) of the batch.

    Attributes:
        rows: int64 [any].
        columns: int64 [any].
        ids: int64 [any].
    """

    rows: torch.Tensor
    columns: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class EditEntries:
    """Edits of one kind at different positions of the batch, which can be repeated together.

    Attributes:
        kind: see `SamplingEdits`.
        at: the logits that they edit: those of tokens, or `ids` is empty and they edit whole positions.
        values: float32, one for each entry.
    """

    kind: int
    at: MaskEntries
    values: torch.Tensor


@dataclass(frozen=True)
class RecordBatch:
    """The records of several outputs, padded to the same length. `collate` makes it.

    Attributes:
        vocab_size: number of tokens of the vocabulary.
        is_token: bool [batch, length]; False for padding.
        token_ids: int64 [batch, length]; 0 for padding.
        logprobs: float32 [batch, length], those of the sampler; 0 for padding.
        temperature: float32 [batch].
        kept: tokens that could be sampled, at the positions whose masks name these.
        removed: tokens that could not be sampled, at the positions whose masks name those.
        removed_at: int64 [2, any]: these positions, also those of which no token was removed.
        bits: bool [any, vocab_size]: masks of the other positions.
        bits_at: int64 [2, any]: these positions.
        edits: edits of the logits, in order.
    """

    vocab_size: int
    is_token: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    temperature: torch.Tensor
    kept: MaskEntries
    removed: MaskEntries
    removed_at: torch.Tensor
    bits: torch.Tensor
    bits_at: torch.Tensor
    edits: tuple[EditEntries, ...]

    def to(self, device: torch.device | str) -> RecordBatch:
        """Return a copy on a device."""
        return RecordBatch(*(_moved(getattr(self, each.name), device) for each in fields(self)))


@dataclass(frozen=True)
class ReplayReport:
    """The differences of a trainer's log-probabilities of sampled tokens from the sampler's.

    A difference is trainer minus sampler, in nats. `ratio` is the mean of its exponential, the importance ratio: 1 if
    they agree.

    Attributes:
        num_tokens: number of tokens compared.
        ratio: with the record.
        largest: the largest absolute difference, with the record.
        ratio_without: without the record: of `log_softmax` of the logits divided by the temperature.
        largest_without: the same.
    """

    num_tokens: int
    ratio: float
    largest: float
    ratio_without: float
    largest_without: float

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: importance ratio {self.ratio:.5f} with the record (largest difference "
            f"{self.largest:.2g}), {self.ratio_without:.5f} without it ({self.largest_without:.2g})"
        )


def collate(records: Sequence[SamplingRecord], length: int | None = None) -> RecordBatch:
    """Pad the records of several outputs to one batch.

    Args:
        records: one per output, whole ones: see `SamplingRecord.join` for those of streams.
        length: of the padded outputs; None: that of the longest.

    Raises:
        ValueError: there is no record, one is longer, a part is missing, or they are of different vocabularies.
    """
    if len({record.vocab_size for record in records}) != 1:
        raise ValueError("records: must be of one vocabulary, and at least one")
    if any(record.start for record in records):
        raise ValueError("records: one does not begin with the first token of its output, see SamplingRecord.join")
    longest = max(map(len, records))
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"length: {length}, and a record has {longest} tokens")
    places = np.concatenate(
        [np.stack([np.full(len(record), row), np.arange(len(record))]) for row, record in enumerate(records)], axis=1
    )
    forms, lengths = (_joined(records, name) for name in ("forms", "lengths"))
    padded = np.zeros((2, len(records), length))
    padded[:, places[0], places[1]] = _joined(records, "token_ids"), _joined(records, "logprobs")
    is_token = np.zeros((len(records), length), bool)
    is_token[places[0], places[1]] = True
    bits = np.unpackbits(_joined(records, "bits"), axis=1, count=records[0].vocab_size, bitorder="little")
    return RecordBatch(
        records[0].vocab_size,
        torch.from_numpy(is_token),
        torch.from_numpy(padded[0].astype(np.int64)),
        torch.from_numpy(padded[1].astype(np.float32)),
        torch.tensor([record.temperature for record in records]),
        _mask(places, lengths, forms == KEPT, _joined(records, "kept")),
        _mask(places, lengths, forms == REMOVED, _joined(records, "removed")),
        torch.from_numpy(places[:, forms == REMOVED]),
        torch.from_numpy(bits.astype(bool)),
        torch.from_numpy(places[:, forms == BITS]),
        tuple(_edits(records)),
    )


def replay(
    logits: torch.Tensor,
    record: SamplingRecord | RecordBatch,
    *,
    offset: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of the output tokens under the distributions that they were sampled from.

    Differentiable with respect to the logits. The tokens that could not be sampled get no gradient.

    Args:
        logits: the model's logits, floating point: [n, vocab] for a record, [batch, length, vocab] for a batch. Those
            at position i predict output token i. They are not divided by the temperature.
        record: of one output, or of a batch on the device of the logits.
        offset: the first token of the logits, if they are those of a part of the vocabulary.
        group: the processes with the other parts; None: `logits` are all.

    Returns:
        Same shape without the vocabulary, at least float32; 0 for padding.

    Raises:
        ValueError: the shape of the logits is not that of the record.
    """
    if isinstance(record, SamplingRecord):
        batch = collate([record]).to(logits.device)
        return replay(logits[None], batch, offset=offset, group=group)[0]
    width = record.vocab_size if group is None else logits.shape[-1]
    if logits.shape != (*record.is_token.shape, width):
        raise ValueError(f"logits: expected shape {(*record.is_token.shape, width)}, got {tuple(logits.shape)}")
    shard = _Shard(_edited(logits, record.edits, offset), record.temperature, offset)
    sums = torch.maximum(shard.sum_of_kept(record), shard.sum_of_others(record))  # at most one is not -inf
    selected = shard.selected(record.token_ids)
    if group is not None:
        largest = sums.detach().clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        largest = torch.where(record.is_token, largest, 0.0)
        sums = _sum_of_all((sums - largest).exp(), group).log() + largest
        selected = _sum_of_all(selected, group)
    return torch.where(record.is_token, selected - sums, 0.0)


def report(logits: torch.Tensor, record: SamplingRecord | RecordBatch) -> ReplayReport:
    """Compare a trainer's log-probabilities with the sampler's, with and without the record.

    What is left with the record are the numerics of two implementations of one model. What the record removes is
    what the sampler did to the distribution.

    Args:
        logits: see `replay`.
        record: see `replay`.
    """
    if isinstance(record, SamplingRecord):
        return report(logits[None], collate([record]).to(logits.device))
    with torch.no_grad():
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / record.temperature[:, None, None]
        plain = scaled.log_softmax(dim=-1).gather(-1, record.token_ids[..., None])[..., 0]
        with_record, without = (
            (each - record.logprobs)[record.is_token].double() for each in (replay(logits, record), plain)
        )
    return ReplayReport(
        len(with_record),
        float(with_record.exp().mean()),
        float(with_record.abs().max()),
        float(without.exp().mean()),
        float(without.abs().max()),
    )


class _Shard:
    """The logits of a part of the vocabulary.

    Args:
        logits: [batch, length, part of the vocabulary].
        temperature: [batch].
        offset: the first token of the part.
    """

    def __init__(self, logits: torch.Tensor, temperature: torch.Tensor, offset: int) -> None:
        self._logits = logits
        self._dtype = torch.promote_types(logits.dtype, torch.float32)
        self._temperature = temperature.to(self._dtype)
        self._offset = offset

    def selected(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens, divided by the temperature: [batch, length]; 0 for those of other parts."""
        ids, is_here = self._local(token_ids)
        found = self._logits.gather(-1, ids[..., None])[..., 0].to(self._dtype) / self._temperature[:, None]
        return torch.where(is_here, found, 0.0)

    def sum_of_kept(self, batch: RecordBatch) -> torch.Tensor:
        """Return the logarithm of the sum of the kept tokens: [batch, length]; -inf at positions of other forms."""
        mask = batch.kept
        ids, is_here = self._local(mask.ids)
        values = self._logits[mask.rows, mask.columns, ids].to(self._dtype) / self._temperature[mask.rows]
        values = torch.where(is_here, values, -torch.inf)
        places = mask.rows * batch.is_token.shape[1] + mask.columns
        count = batch.is_token.numel()
        largest = values.new_full((count,), -torch.inf).scatter_reduce(0, places, values.detach(), "amax")
        base = torch.where(largest.isfinite(), largest, 0.0)
        sums = values.new_zeros(count).index_add(0, places, (values - base[places]).exp())
        # The logarithm of 0 has no gradient.
        logs = torch.where(sums > 0, sums, 1.0).log() + base
        return torch.where(sums > 0, logs, -torch.inf).view(batch.is_token.shape)

    def sum_of_others(self, batch: RecordBatch) -> torch.Tensor:
        """Return that of the positions whose masks name the removed tokens, or have bits."""
        at = torch.cat([batch.removed_at, batch.bits_at], dim=1)
        values = self._logits[at[0], at[1]].to(self._dtype) / self._temperature[at[0], None]
        forbidden = torch.zeros_like(values, dtype=torch.bool)
        places = torch.full(batch.is_token.shape, -1, device=at.device)
        places[at[0], at[1]] = torch.arange(at.shape[1], device=at.device)
        ids, is_here = self._local(batch.removed.ids)
        forbidden[places[batch.removed.rows, batch.removed.columns][is_here], ids[is_here]] = True
        width = self._logits.shape[-1]
        forbidden[batch.removed_at.shape[1] :] = ~batch.bits[:, self._offset : self._offset + width]
        sums = values.masked_fill(forbidden, -torch.inf).logsumexp(dim=-1)
        result = sums.new_full(batch.is_token.shape, -torch.inf)
        return result.index_put((at[0], at[1]), sums)

    def _local(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places of tokens in this part, 0 for those of others, and whether they are in it."""
        ids = token_ids - self._offset
        is_here = (ids >= 0) & (ids < self._logits.shape[-1])
        return torch.where(is_here, ids, 0), is_here


class _SumOfAll(torch.autograd.Function):
    """Sum over processes. Each has the same loss, so the gradient of its own summand is that of the sum."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _sum_of_all(values: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = _SumOfAll.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def _edited(logits: torch.Tensor, edits: Sequence[EditEntries], offset: int) -> torch.Tensor:
    """Return a copy of the logits with the edits, or the same if there are none."""
    if not edits:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for each in edits:
        rows, columns, values = each.at.rows, each.at.columns, each.values.to(logits.dtype)
        if not len(each.at.ids):
            logits = logits.index_put((rows, columns), _edit(each.kind, logits[rows, columns], values[:, None]))
            continue
        ids = each.at.ids - offset
        here = (ids >= 0) & (ids < logits.shape[-1])
        index, values = (rows[here], columns[here], ids[here]), values[here]
        logits = logits.index_put(index, _edit(each.kind, logits[index], values))
    return logits


def _edit(kind: int, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if kind == ADD:
        return logits + values
    if kind == SCALE:
        return logits * values
    if kind == SET:
        return values
    return torch.where(logits > 0, logits / values, logits * values)


def _edits(records: Sequence[SamplingRecord]) -> Iterator[EditEntries]:
    """Yield the edits of several outputs: first the first edits of all tokens, then the second ones, by their kind."""
    rows = np.repeat(np.arange(len(records)), [len(record.edits) for record in records])
    positions, kinds, lengths, tokens, values, counts = (
        np.concatenate([getattr(record.edits, name) for record in records])
        for name in ("positions", "kinds", "lengths", "tokens", "values", "num_values")
    )
    if not len(rows):
        return
    is_first = np.concatenate([[True], (rows[1:] != rows[:-1]) | (positions[1:] != positions[:-1])])
    starts = np.flatnonzero(is_first)
    levels = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    groups = np.stack([levels, kinds, lengths == 0])
    of_token, of_value = np.repeat(np.arange(len(rows)), lengths), np.repeat(np.arange(len(rows)), counts)
    for group in np.unique(groups, axis=1).T:
        chosen = (groups == group[:, None]).all(axis=0)
        entries = np.flatnonzero(chosen) if group[2] else of_token[chosen[of_token]]
        found = values[chosen[of_value]]
        if group[1] in (SCALE, REPETITION) and not group[2]:
            found = np.repeat(found, lengths[chosen])
        at = MaskEntries(
            torch.from_numpy(rows[entries]),
            torch.from_numpy(positions[entries]),
            torch.from_numpy(tokens[chosen[of_token]]),
        )
        yield EditEntries(int(group[1]), at, torch.from_numpy(found))


def _joined(records: Sequence[SamplingRecord], name: str) -> Any:
    return np.concatenate([getattr(record, name) for record in records])


def _mask(places: Any, lengths: Any, is_form: Any, ids: Any) -> MaskEntries:
    rows, columns = np.repeat(places[:, is_form], lengths[is_form], axis=1)
    return MaskEntries(torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(ids))


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    if isinstance(value, MaskEntries | EditEntries):
        return type(value)(*(_moved(getattr(value, each.name), device) for each in fields(value)))
    return value.to(device) if isinstance(value, torch.Tensor) else value
