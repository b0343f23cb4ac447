"""Base class of processors that change how tokens are sampled at random, by the logits of the step alone."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.ops.rows import Scratch, one_thread_for_few, row_parts
from logitship.sampler.ops.sample_tokens import UniformNumbers

from .row_constants import RowConstants, to_device
from .row_sums import row_sums

_PART_SIZE = 2**18
"""Number of logits to process at a time."""
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_LOWEST = -200.0
"""Distance from the largest logit at which a probability is 0 in float32."""


@dataclass(frozen=True)
class RuleRows:
    """The rows of a batch that a rule edits.

    Attributes:
        places: their places in the batch, int64 [n], ascending.
        constants: float64 [n, any], see `RandomRowsProcessor.constants`.
        on_device: the places on the device of the logits; None if these are all rows of the batch.
        constants_on_device: the constants there, float32.
    """

    places: npt.NDArray[np.int64]
    constants: npt.NDArray[np.float64]
    on_device: torch.Tensor | None
    constants_on_device: torch.Tensor

    @classmethod
    def of(
        cls, places: npt.NDArray[np.int64], constants: npt.NDArray[np.float64], num_rows: int, device: torch.device
    ) -> RuleRows:
        """Copy to the device what is needed there, without waiting for it."""
        return cls(
            places,
            constants,
            to_device(places, np.int64, device) if len(places) < num_rows else None,
            to_device(constants.astype(np.float32), np.float32, device),
        )

    def parts(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows' logits in parts, for edits in place, with the places among the rows."""
        for part in row_parts(len(self.places), logits, _PART_SIZE):
            if self.on_device is None:
                yield part, logits[part]
            else:
                some = logits[self.on_device[part]]
                yield part, some
                logits[self.on_device[part]] = some


class RandomRowsProcessor(BuiltinProcessor):
    """Edits the logits of rows with random sampling, and leaves greedy ones as they are.

    A row is greedy if its temperature is 0, or its `top_k` 1. Rows without a token to sample stay as they are.

    A subclass keeps at least one of a row's finite logits, and keeps it finite.
    """

    def __init__(self) -> None:
        self._rows: RowConstants[dict[str, Any], RuleRows] = RowConstants(self._make_rows)
        self._scratch = Scratch()

    @abstractmethod
    def constants(self, prepared: Any, temperature: float) -> Sequence[float] | None:
        """Return a row's parameters as numbers; None if they switch the processor off.

        Args:
            prepared: result of `prepare`.
            temperature: the request's, in the range of normal float32 numbers.
        """

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`. If only one token is left, it stays."""

    def _make_rows(self, param_list: Sequence[dict[str, Any]], device: torch.device) -> RuleRows:
        of_rows = {}
        for place, params in enumerate(param_list):
            temperature = temperature_of(params["__req__"])
            constants = None if temperature is None else self.constants(self.prepared(params), temperature)
            if constants is not None:
                of_rows[place] = constants
        places = np.array([*of_rows], dtype=np.int64)
        table = np.array([*of_rows.values()] or [()], dtype=np.float64)
        return RuleRows.of(places, table, len(param_list), device)

    def _buffer(self, number: int, logits: torch.Tensor) -> torch.Tensor | None:
        """Return one of several buffers of the size of the logits."""
        return self._scratch.rows(number * len(logits), len(logits), logits)

    def _distances(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Return each logit's distance from the largest one after temperature, at most 0 and at least -200."""
        distances = torch.sub(logits, logits.amax(dim=1, keepdim=True), out=self._buffer(0, logits))
        return distances.div_(temperature).clamp_(min=_LOWEST)

    def _weights(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Return the probabilities after temperature in units of the largest one. Overwrites those of the last call."""
        return self._distances(logits, temperature).exp_()

    def _entropy(self, distances: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the entropy in nats, and the logarithm of the sum of the weights, float64 [rows, 1] each.

        Args:
            distances: result of `_distances`.
            weights: their exponentials, in other memory.
        """
        total = row_sums(weights)
        mean = row_sums(torch.mul(distances, weights, out=self._buffer(2, distances))) / total
        log_total = total.log()
        return log_total - mean, log_total


class SamplingRule(RandomRowsProcessor):
    """Edits rows by the logits of the step alone. A subclass has one function of them."""

    @abstractmethod
    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """Edit some rows in place. Must not synchronize with a device other than the CPU.

        Args:
            logits: float32 [rows, vocab].
            constants: float32 [rows, 1] each.
        """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Edit the rows with random sampling, in place."""
        if custom_param_list:
            self._edit(logits, self._rows.of(custom_param_list, logits.device))
        return logits

    def _edit(self, logits: torch.Tensor, rows: RuleRows) -> None:
        if not len(rows.places):
            return
        constants = rows.constants_on_device.unsqueeze(-1).unbind(1)
        with one_thread_for_few(logits):
            for part, some in rows.parts(logits):
                self.edit(some, *(each[part] for each in constants))


def temperature_of(request: Any) -> float | None:
    """Return the temperature of a row with random sampling, in the range of normal float32 numbers; None if greedy.

    Args:
        request: the row's `__req__`.
    """
    params = request.sampling_params
    return None if params.greedy or params.top_k == 1 else min(max(params.temperature, _LEAST), _MOST)


class StepNumbers:
    """Random numbers of rows, which depend on a row's seed and number of output tokens alone.

    Args:
        stream: see `uniform_numbers`.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._numbers: RowConstants[dict[str, Any], UniformNumbers] = RowConstants(self._make_numbers)

    def of(self, param_list: Sequence[dict[str, Any]]) -> npt.NDArray[np.float64]:
        """Return this step's number of each row: float64 [rows], in [0, 1)."""
        lengths = np.array([len(params["__req__"].output_ids) for params in param_list], dtype=np.int64)
        return self._numbers.of(param_list, torch.device("cpu")).at(lengths)

    def _make_numbers(self, param_list: Sequence[dict[str, Any]], device: torch.device) -> UniformNumbers:
        seeds = np.array([seed_of(params["__req__"]) for params in param_list], dtype=np.uint64)
        return UniformNumbers(seeds, self._stream)


def seed_of(request: Any) -> int:
    """Return the seed of a row's random numbers, from 0 to 2^64 - 1.

    That of the request; if the engine gives none, one made from the request id, which is the same on all ranks.

    Args:
        request: the row's `__req__`.
    """
    seed: int | None = request.sampling_params.seed
    if seed is None:
        return int.from_bytes(hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest())
    return seed % 2**64
