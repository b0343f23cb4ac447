"""Traces of a row's candidates through the stages of a step, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from logitship.client.errors import LogitshipError
from logitship.client.records import TraceStage
from logitship.sampler.ops.candidates import top_candidates
from logitship.sampler.ops.sampler_op import SamplerOp, SamplingRow
from logitship.sampler.ops.sampling_masks import RowMask, SamplingEdit, StepMasks
from logitship.sampler.ops.top_k_top_p import kept_tokens

from .row_errors import SamplingEditsTooLongError, SamplingMasksTooLargeError
from .sampling_edits import edits_between, edits_of_request
from .sampling_params import SamplingParams

_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class RowTrace:
    """Trace of one token.

    Attributes:
        token_id: the sampled token.
        candidates: the sampled token and the most likely tokens of each stage, by descending probability of the model.
        stages: stages in the order in which they ran, with the log-probabilities of the candidates.
    """

    token_id: int
    candidates: tuple[int, ...]
    stages: tuple[TraceStage, ...]


@dataclass(frozen=True)
class Snapshot:
    """A row at one stage.

    Attributes:
        stage: the stage, without its numbers.
        logits: float32 [vocab], on the CPU.
    """

    stage: TraceStage
    logits: torch.Tensor


class StepTrace:
    """The traced rows of one step. Does nothing if there are none.

    Keeps the logits of each traced row and stage on the CPU until `finish`.

    Args:
        traced: the traced rows, by place among the step's rows.
    """

    def __init__(self, traced: Mapping[int, SamplingRow]) -> None:
        self.traced = traced
        self._snapshots: dict[int, list[Snapshot]] = {row: [] for row in traced}

    def take(self, row: int) -> list[Snapshot]:
        """Return the snapshots of a row that continues in a later step; empty if it is not traced."""
        return self._snapshots.get(row, []).copy()

    def resume(self, row: int, recorded: list[Snapshot]) -> None:
        """Replace the snapshots of a row by those that an earlier step recorded of the same token."""
        if row in self.traced:
            self._snapshots[row] = recorded

    def record(self, stage: str, logits: torch.Tensor) -> None:
        """Record the current logits of the traced rows.

        Args:
            stage: `model` or `request`, see `TraceStage`.
            logits: float32 [rows, vocab].
        """
        for row in self.traced:
            self._keep(row, TraceStage(stage), logits[row])

    def record_processor(self, row: int, name: str, digest: str, logits: torch.Tensor, *, again: bool) -> None:
        """Record a row after a processor. Does nothing for rows that are not traced.

        Args:
            row: place of the row among the step's rows.
            name: name of the processor.
            digest: digest of the processor.
            logits: float32 [vocab].
            again: True if it is a mask that has already run before the other processors.
        """
        if row in self.traced:
            self._snapshots[row].append(after_processor(name, digest, logits, again=again))

    def record_sampled(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record the distributions that the tokens were sampled from.

        Args:
            logits: float32 [rows, vocab]: for random rows, the input of softmax.
            tokens: sampled tokens, int64 [rows].
        """
        for row, (params, _, _) in self.traced.items():
            if params.trace is None:
                continue
            row_logits = logits[row].cpu()
            if params.greedy:
                kept = torch.zeros_like(row_logits, dtype=torch.bool)
                kept[tokens[row]] = True
            else:
                kept = kept_tokens(row_logits, params.top_k, params.top_p)
            self._keep(row, TraceStage("sampling"), row_logits.masked_fill(~kept, _NEGATIVE_INFINITY))

    def finish(self, token_ids: Sequence[int], without: Collection[int]) -> list[RowTrace | None]:
        """Return the traces.

        Args:
            token_ids: sampled token of each row.
            without: rows without a token.

        Returns:
            One entry per row; None for rows that are not traced.
        """
        traces: list[RowTrace | None] = [None] * len(token_ids)
        for row, (params, _, _) in self.traced.items():
            if row not in without and params.trace is not None:
                traces[row] = _trace(token_ids[row], self._snapshots[row], params.trace)
        return traces

    def add_edits(self, row_masks: list[RowMask | None], masks: StepMasks, faults: dict[int, LogitshipError]) -> None:
        """Add to the sampling masks what was done to the model's logits, for the rows that ask for it.

        Args:
            row_masks: one per row; edited in place.
            masks: what recorded them.
            faults: faults by row; gets those of rows whose edits are too large.
        """
        for row, (params, prompt, output) in self.traced.items():
            mask = row_masks[row]
            if mask is None or not params.return_sampling_edits or params.greedy:
                continue
            try:
                tokens = mask.could_be_sampled(masks.vocab_size)
                edits = tuple(_edits(self._snapshots[row], tokens, params, [*(prompt or ()), *output]))
                row_masks[row] = masks.with_edits(row, mask, edits)
            except (SamplingEditsTooLongError, SamplingMasksTooLargeError) as error:
                faults[row], row_masks[row] = error, None

    def _keep(self, row: int, stage: TraceStage, logits: torch.Tensor) -> None:
        self._snapshots[row].append(_snapshot(stage, logits))


class Traces(SamplerOp[SamplingRow, Mapping[int, SamplingRow]]):
    """Traces the rows that ask for it."""

    def new_state(self, row: SamplingRow) -> SamplingRow | None:
        """Return the row of a request with a trace, or with a record of its edits."""
        return row if row.params.trace is not None or row.params.return_sampling_edits else None

    def begin(self, rows: Sequence[int] | None) -> StepTrace:
        """Return the trace of a step."""
        return StepTrace(self.prepared(rows) or {})


def after_processor(name: str, digest: str, logits: torch.Tensor, *, again: bool) -> Snapshot:
    """Return a row after a processor; for the arguments see `StepTrace.record_processor`."""
    return _snapshot(TraceStage("processor", name, digest, again), logits)


def _snapshot(stage: TraceStage, logits: torch.Tensor) -> Snapshot:
    return Snapshot(stage, logits.detach().to("cpu", copy=True))


def _edits(
    snapshots: Sequence[Snapshot], tokens: npt.NDArray[np.int64], params: SamplingParams, seen: Sequence[int]
) -> Iterator[SamplingEdit]:
    """Yield the edits between a row's snapshots, of the logits of some tokens."""
    rows = [each.logits.numpy() for each in snapshots]
    yield from edits_of_request(rows[0], rows[1], tokens, params, seen)
    for before, after, snapshot in zip(rows[1:], rows[2:], snapshots[2:], strict=False):
        if snapshot.stage.name is not None:
            yield from edits_between(before[tokens], after[tokens], tokens, snapshot.stage.name)


def _trace(token_id: int, snapshots: Sequence[Snapshot], top: int) -> RowTrace:
    logits = torch.stack([each.logits for each in snapshots])
    logprobs = logits.log_softmax(dim=-1)
    # A stage is NaN if it forbids every token, or the model returned NaN or +inf. A later one may allow tokens again.
    logprobs = logprobs.masked_fill(logprobs.isnan(), _NEGATIVE_INFINITY)
    values, token_ids = top_candidates(logprobs, top)
    found = token_ids[~values.isneginf()].tolist()
    of_model = logprobs[0]
    candidates = sorted({token_id, *found}, key=lambda candidate: (-float(of_model[candidate]), candidate))
    allowed = (logits > _NEGATIVE_INFINITY).sum(dim=-1).tolist()
    stages = [
        replace(
            each.stage,
            logprobs=tuple(None if logprob == _NEGATIVE_INFINITY else logprob for logprob in row),
            num_allowed=num_allowed,
        )
        for each, row, num_allowed in zip(snapshots, logprobs[:, candidates].tolist(), allowed, strict=True)
    ]
    return RowTrace(token_id, tuple(candidates), tuple(stages))
