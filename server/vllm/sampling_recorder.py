"""Records how vLLM samples the tokens of requests with `return_sampling_mask`, for both of its model runners.

Assumptions:
* V1: for each step, vLLM's `Sampler` calls its methods `apply_logits_processors` and then, unless all rows are greedy,
  the `forward` of its `topk_topp_sampler`, with the logits of all rows of the batch. Both may change their argument.
* V1 samples from the softmax of what `apply_top_k_top_p` leaves of the logits.
* V2: `Sampler.sample` returns tokens and the logits that it has sampled from, unless it uses a fused sampler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from logitship.client.sampling_record import KEPT, SamplingRecord
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.ops.sampling_masks import RowMask, SamplingEdit, packed_mask
from logitship.sampler.sampling_edits import edits_between, edits_of_request
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.sampling_records import sampling_record

from .batch_requests import converted
from .extra_args import asks_for_edits, asks_for_masks
from .settings import logger

_GREEDY = 1e-5
"""vLLM takes the most likely token at lower temperatures."""
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_EXACT = ("forward_native", "forward_cpu")
"""V1's samplers that sample from what `apply_top_k_top_p` leaves."""
_FUSED = ("use_flashinfer", "use_xpu_sampler")
"""Switches of V2's fused samplers, which return no logits."""


@dataclass
class RecordedRow:
    """One row of a step, before its token is known on the host.

    Attributes:
        params: vLLM's `SamplingParams`.
        vocab_size: number of columns of the logits.
        logits: float32 [vocab]: those that the softmax is taken of; None: the most likely token is taken.
        stages: float32 [vocab] each: the model's logits, those before and after the processors of clients, and in V1
            after penalties, which V2 has applied before; empty if the request does not ask for edits.
        seen: the tokens of its prompt and output; empty if edits do not depend on them.
    """

    params: Any
    vocab_size: int
    logits: torch.Tensor | None = None
    stages: list[torch.Tensor] = field(default_factory=list)
    seen: Sequence[int] = ()

    def record(self, token: int) -> SamplingRecord:
        """Return the record of the token that was sampled.

        Raises:
            SamplingEditsTooLongError: an edit names too many tokens.
        """
        if self.logits is None:
            mask = RowMask(KEPT, np.array([token]), np.zeros(1, np.float32))
            return sampling_record(1.0, self.vocab_size, [token], [mask])
        mask = packed_mask(self.logits, token)
        if self.stages:
            mask = replace(mask, edits=(*self._edits(mask.could_be_sampled(self.vocab_size)),))
        return sampling_record(self.params.temperature, self.vocab_size, [token], [mask])

    def _edits(self, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[SamplingEdit]:
        model, before, after, *request = (stage.cpu().numpy() for stage in self.stages)
        biases = SamplingParams(logit_bias=self.params.logit_bias or {})
        penalties = {name: getattr(self.params, name) for name in _PENALTIES}
        first = biases if request else replace(biases, **penalties)
        yield from edits_of_request(model, before, tokens, first, self.seen)
        yield from edits_between(before[tokens], after[tokens], tokens, "a logits processor of the request")
        if request:
            yield from edits_of_request(after, request[0], tokens, SamplingParams(**penalties), self.seen)


class SamplingRecorder:
    """Records the rows of requests that ask for it. Does nothing in a step without them.

    Args:
        runner: vLLM's `GPUModelRunner`.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)  # it holds the plugin
        self._step: dict[int, RecordedRow] = {}

    def record_stage(self, logits: torch.Tensor) -> None:
        """Record the logits before or after the processors of clients, [rows, vocab]."""
        with self._or_no_records():
            for row, sampled in self._step.items():
                if asks_for_edits(sampled.params):
                    sampled.stages.append(logits[row].float().clone())

    @contextmanager
    def _or_no_records(self) -> Iterator[None]:
        """Drop the step's records on an error, which would stop the engine. Their requests end in the front end."""
        try:
            yield
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("the sampling of a step cannot be recorded")
            self._step = {}

    def take(self) -> Mapping[str, RecordedRow]:
        """Return the rows of the step by request id, and clear them."""
        step, self._step, found = self._step, {}, {}
        with self._or_no_records():
            found = {self._request_id(row): sampled for row, sampled in step.items()}
        return found

    def _request_id(self, row: int) -> str:
        raise NotImplementedError

    @property
    def _live(self) -> Any:
        runner = self._runner()
        assert runner is not None
        return runner


class BatchRecorder(SamplingRecorder):
    """`SamplingRecorder` for model runner V1, whose sampler exists."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._rows: BatchRows[Any] = BatchRows(lambda params, *_: params if asks_for_masks(params) else None)
        sampler = runner.sampler
        sampler.apply_logits_processors = self._around_processors(sampler.apply_logits_processors)
        sampler.topk_topp_sampler.forward = self._before_sampling(sampler.topk_topp_sampler.forward)

    def update_state(self, update: Any) -> None:
        """Apply vLLM's `BatchUpdate`; None: the rows are the same as in the last step."""
        self._step = {}
        if update is not None and (self._rows or any(asks_for_masks(params) for _, params, *_ in update.added)):
            self._rows.update(converted(update))

    def _request_id(self, row: int) -> str:
        rid: str = self._live.input_batch.req_ids[row]
        return rid

    def _sampled_row(self, row: int, params: Any, vocab_size: int) -> RecordedRow:
        if not asks_for_edits(params) or params.repetition_penalty == 1:
            return RecordedRow(params, vocab_size)
        request = self._live.requests[self._request_id(row)]
        return RecordedRow(params, vocab_size, seen=[*(request.prompt_token_ids or ()), *request.output_token_ids])

    def _around_processors(self, apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(apply)
        def wrapped(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            with self._or_no_records():
                self._step = {
                    row: self._sampled_row(row, params, logits.shape[-1]) for row, params in self._rows.items()
                }
            self.record_stage(logits)
            logits = apply(logits, *args, **kwargs)
            self.record_stage(logits)
            return logits

        return wrapped

    def _before_sampling(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def wrapped(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
            random = {row: each for row, each in self._step.items() if each.params.temperature >= _GREEDY}
            if not random:
                return forward(logits, generators, k, p)
            with self._or_no_records():
                from vllm.v1.sample.ops.topk_topp_sampler import (  # pyright: ignore[reportMissingImports]
                    apply_top_k_top_p,
                )

                rows = [*random]
                kept = apply_top_k_top_p(logits[rows], *(each if each is None else each[rows] for each in (k, p)))
                for each, row_logits in zip(random.values(), kept, strict=True):
                    each.logits = row_logits
            # Fused kernels round in their own way, and may sample a token that is not among those.
            sample = forward if forward.__name__ in _EXACT else self._live.sampler.topk_topp_sampler.forward_native
            return sample(logits, generators, k, p)

        return wrapped


def missing_methods(runner: Any) -> list[str]:
    """Return the methods that `BatchRecorder` wraps and the sampler of this vLLM's V1 does not have."""
    names = ("sampler.apply_logits_processors", "sampler.topk_topp_sampler.forward")
    return [f"GPUModelRunner.{name}" for name in names if not _has(runner, name)]


def _has(value: Any, path: str) -> bool:
    try:
        attrgetter(path)(value)
    except AttributeError:
        return False
    return True


class SlotRecorder(SamplingRecorder):
    """`SamplingRecorder` for model runner V2, without drafts."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._asking: dict[int, Any] = {}
        self._slots: Sequence[int] = ()
        self._is_wrapped = False

    def add_request(self, slot: int, params: Any) -> bool:
        """Add a request that was given a slot. Return False if it does not ask for masks."""
        self._asking.pop(slot, None)
        if asks_for_masks(params):
            self._asking[slot] = params
            if not self._is_wrapped:  # vLLM makes its sampler after the plugin
                self._live.sampler.sample = self._around_sampling(self._live.sampler.sample)
                self._is_wrapped = True
        return slot in self._asking

    def _request_id(self, row: int) -> str:
        rid: str = self._live.req_states.index_to_req_id[self._slots[row]]
        return rid

    def _sampled_row(self, row: int, vocab_size: int) -> RecordedRow:
        slot = self._slots[row]
        params, states = self._asking[slot], self._live.req_states
        if not asks_for_edits(params) or params.repetition_penalty == 1:
            return RecordedRow(params, vocab_size)
        length = int(states.total_len.gpu[slot])
        return RecordedRow(params, vocab_size, seen=states.all_token_ids.gpu[slot, :length].tolist())

    def _around_sampling(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(sample)
        def wrapped(logits: torch.Tensor, rows: Any, slots: Any, slots_np: Any, *args: Any, **kwargs: Any) -> Any:
            self._step = {}
            with self._or_no_records():
                self._slots = slots_np.tolist()
                asking = [row for row, slot in enumerate(self._slots) if slot in self._asking]
                self._step = {row: self._sampled_row(row, logits.shape[-1]) for row in asking}
            if not self._step:
                return sample(logits, rows, slots, slots_np, *args, **kwargs)
            self.record_stage(logits)
            with _returning_logits(self._live.sampler):
                tokens, kept = sample(logits, rows, slots, slots_np, *args, **kwargs)
            with self._or_no_records():
                for row, sampled in self._step.items():
                    if sampled.params.temperature >= _GREEDY:
                        sampled.logits = kept[row].float().clone()
            return tokens, kept

        return wrapped


@contextmanager
def _returning_logits(sampler: Any) -> Iterator[None]:
    """Let V2's sampler use no fused kernel, which would not return the logits that it samples from."""
    switches = {name: getattr(sampler, name) for name in _FUSED if hasattr(sampler, name)}
    vars(sampler).update(dict.fromkeys(switches, False))
    try:
        yield
    finally:
        vars(sampler).update(switches)
