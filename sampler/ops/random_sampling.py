"""Random sampling: top-k, then top-p, then a token by the row's own random number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from logitship.client.errors import LogitshipError
from logitship.sampler.row_errors import NonFiniteLogitsError

from .rows import Scratch, row_parts
from .sample_tokens import UniformNumbers, random_sample
from .sampler_op import SamplerOp, SamplingRow
from .sampling_masks import StepMasks
from .top_k_top_p import removes_tokens, top_k_top_p_sample

_PART_SIZE = 2**20
"""Number of probabilities that are processed at a time."""


@dataclass(frozen=True)
class RandomRows:
    """Rows with random sampling.

    Attributes:
        rows: int64 [n], ascending.
        row_list: the same.
        top_k: 0 for all tokens. None if the rows use neither top-k nor top-p.
        top_p: above 0, at most 1.
        numbers: random numbers by position.
        outputs: the live outputs.
    """

    rows: torch.Tensor
    row_list: list[int]
    top_k: list[int] | None
    top_p: list[float]
    numbers: UniformNumbers
    outputs: list[list[int]]

    def uniform(self) -> npt.NDArray[np.float64]:
        """Return this step's random number of each row: float64 [n], in [0, 1)."""
        positions = np.array([len(output) for output in self.outputs], dtype=np.int64)
        return self.numbers.at(positions)


class RandomSampling(SamplerOp[SamplingRow, list[RandomRows]]):
    """Samples the tokens of the rows with a temperature above 0."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self._vocab_size = vocab_size
        self._probabilities = Scratch()

    def new_state(self, row: SamplingRow) -> SamplingRow | None:
        """Return the row; None if it is greedy.

        Raises:
            ValueError: the request has no seed.
        """
        if row.params.greedy:
            return None
        if row.params.seed is None:
            raise ValueError("seed: required for random sampling; the engine sets it at admission")
        return row

    def prepare(self, states: Mapping[int, SamplingRow]) -> list[RandomRows]:
        """Return the rows without top-k and top-p, and those with one or both, as far as there are any."""
        filtered = {row: state for row, state in states.items() if removes_tokens(state.params, self._vocab_size)}
        unfiltered = {row: state for row, state in states.items() if row not in filtered}
        return [self._random_rows(part, filters=part is filtered) for part in (unfiltered, filtered) if part]

    def _random_rows(self, states: Mapping[int, SamplingRow], *, filters: bool) -> RandomRows:
        params = [state.params for state in states.values()]
        return RandomRows(
            rows=self._to_device(np.array([*states], dtype=np.int64)),
            row_list=[*states],
            top_k=[max(each.top_k, 0) for each in params] if filters else None,
            top_p=[each.top_p for each in params],
            numbers=UniformNumbers(np.array([(each.seed or 0) % 2**64 for each in params], dtype=np.uint64)),
            outputs=[state.output_token_ids for state in states.values()],
        )

    def sample(
        self,
        logits: torch.Tensor,
        random: list[RandomRows],
        tokens: torch.Tensor,
        faults: dict[int, LogitshipError],
        masks: StepMasks,
    ) -> None:
        """Sample the tokens of some rows.

        Args:
            logits: float32 [rows, vocab].
            random: the random ones among the rows.
            tokens: int64 [rows]: gets their tokens.
            faults: faults by row: gets those of rows without a finite logit.
            masks: gets the tokens that could be sampled.
        """
        for part in random:
            tokens.index_copy_(0, part.rows, self._sample(logits, part, faults, masks))

    def _sample(
        self, logits: torch.Tensor, random: RandomRows, faults: dict[int, LogitshipError], masks: StepMasks
    ) -> torch.Tensor:
        uniform = random.uniform()
        tokens = torch.zeros_like(random.rows)
        for part in row_parts(len(uniform), logits, _PART_SIZE):
            rows = random.rows[part]
            # A view if these are all rows.
            some = logits[part] if len(random.rows) == len(logits) else logits[rows]
            probabilities, some = _softmax(some, rows, faults, out=self._probabilities.rows(0, len(some), some))
            if random.top_k is None:
                tokens[part] = random_sample(probabilities, self._to_device(uniform[part]))
            else:
                top_k, top_p, numbers = random.top_k[part], random.top_p[part], uniform[part].tolist()
                in_part = random.row_list[part]
                kept = dict.fromkeys(place for place, row in enumerate(in_part) if row in masks.rows)
                tokens[part] = top_k_top_p_sample(some, probabilities, top_k, top_p, numbers, kept)
                masks.keep({in_part[place]: found for place, found in kept.items() if found is not None})
        return tokens


def _softmax(
    logits: torch.Tensor, rows: torch.Tensor, faults: dict[int, LogitshipError], out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of some rows, and the logits that they belong to: those of unusable rows are zero.

    Args:
        logits: float32 [n, vocab].
        rows: int64 [n]: keys of the rows in `faults`.
        faults: faults by row; edited in place.
        out: buffer for the probabilities, float32 in the shape of the logits.
    """
    probabilities = torch.softmax(logits, dim=-1, out=out)
    # An installed processor may have left a non-finite logit at step 9. Softmax spreads it over the whole row, so one
    # column shows it.
    if math.isfinite(probabilities[:, 0].sum()):
        return probabilities, logits
    broken = probabilities[:, 0].isnan()
    for row in rows[broken].tolist():
        faults.setdefault(row, NonFiniteLogitsError(was_checked=True))
    logits = logits.masked_fill(broken[:, None], 0.0)
    return logits.softmax(dim=-1), logits
