"""What happened to a row's candidates on their way through a step, for the requests that ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from logitship.client.records import TraceStage
from logitship.sampler.ops.candidates import top_candidates
from logitship.sampler.ops.top_k_top_p import kept_tokens

from .sampling_params import SamplingParams

_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class RowTrace:
    """The trace of one token.

    Attributes:
        token_id: the token that was drawn.
        candidates: the most likely tokens of each stage, and the one that was drawn; the most likely of the model
            first.
        stages: in the order in which they ran. Their log-probabilities are those of the candidates.
    """

    token_id: int
    candidates: tuple[int, ...]
    stages: tuple[TraceStage, ...]


@dataclass(frozen=True)
class _Snapshot:
    """A row at one stage.

    Attributes:
        stage: without its numbers.
        logits: float32 [vocab], on the host.
    """

    stage: TraceStage
    logits: torch.Tensor


class StepTrace:
    """The rows of one step that are traced. Without such rows, all of it does nothing.

    What is seen is kept on the host, a vocabulary for each row and stage, until `finish`.

    Args:
        top: how many of the most likely tokens each traced row asks for, by its place among the step's rows.
    """

    def __init__(self, top: Mapping[int, int]) -> None:
        self.top = top
        self._snapshots: dict[int, list[_Snapshot]] = {row: [] for row in top}

    def record(self, stage: str, logits: torch.Tensor) -> None:
        """Keep what the traced rows are now.

        Args:
            stage: `model` or `request`, see `TraceStage`.
            logits: float32 [rows, vocab].
        """
        for row in self.top:
            self._keep(row, TraceStage(stage), logits[row])

    def record_processor(self, row: int, name: str, digest: str, logits: torch.Tensor, *, again: bool) -> None:
        """Keep what a processor has made of a row. Harmless for rows that are not traced.

        Args:
            logits: float32 [vocab].
            again: it is a mask that ran before the others already.
        """
        if row in self.top:
            self._keep(row, TraceStage("processor", name, digest, again), logits)

    def record_sampled(self, logits: torch.Tensor, params: Sequence[SamplingParams], tokens: torch.Tensor) -> None:
        """Keep what the tokens were drawn from.

        Args:
            logits: float32 [rows, vocab]: of the random rows, as softmax takes them.
            params: of each row.
            tokens: int64 [rows].
        """
        for row in self.top:
            drawn_from = logits[row].cpu()
            if params[row].greedy:
                kept = torch.zeros_like(drawn_from, dtype=torch.bool)
                kept[tokens[row]] = True
            else:
                kept = kept_tokens(drawn_from, params[row].top_k, params[row].top_p)
            self._keep(row, TraceStage("sampling"), drawn_from.masked_fill(~kept, _NEGATIVE_INFINITY))

    def finish(self, token_ids: Sequence[int], without: Mapping[int, object]) -> list[RowTrace | None]:
        """The traces.

        Args:
            token_ids: of each row, what was drawn.
            without: rows that have no token.

        Returns:
            One entry a row; None for those that are not traced.
        """
        traces: list[RowTrace | None] = [None] * len(token_ids)
        for row in self.top.keys() - without.keys():
            traces[row] = _trace(token_ids[row], self._snapshots[row], self.top[row])
        return traces

    def _keep(self, row: int, stage: TraceStage, logits: torch.Tensor) -> None:
        self._snapshots[row].append(_Snapshot(stage, logits.detach().to("cpu", copy=True)))


def _trace(token_id: int, snapshots: Sequence[_Snapshot], top: int) -> RowTrace:
    logprobs = torch.stack([each.logits for each in snapshots]).log_softmax(dim=-1)
    values, token_ids = top_candidates(logprobs, top)
    found = token_ids[~values.isneginf()].tolist()
    of_model = logprobs[0]
    candidates = sorted({token_id, *found}, key=lambda candidate: (-float(of_model[candidate]), candidate))
    allowed = (~logprobs.isneginf()).sum(dim=-1).tolist()
    stages = [
        replace(
            each.stage,
            logprobs=tuple(None if logprob == _NEGATIVE_INFINITY else logprob for logprob in row),
            num_allowed=num_allowed,
        )
        for each, row, num_allowed in zip(snapshots, logprobs[:, candidates].tolist(), allowed, strict=True)
    ]
    return RowTrace(token_id, tuple(candidates), tuple(stages))
