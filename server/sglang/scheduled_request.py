"""A request with processors in SGLang's scheduler, as the plugin keeps it from its first step to its last."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.processor_groups import ProcessorUse, fork_uses
from logitship.sampler.sampling_params import SamplingParams

_ATTRIBUTE = "_logitship_request"


@dataclass(frozen=True, eq=False)
class SampledRow:
    """Sampled token of a row of a step, as SGLang reports it.

    Attributes:
        row: the row.
        token_ids: the tokens of all rows.
        logprobs: fields of SGLang's `LogitsProcessorOutput` with an item for each row, by name; those that it has.
    """

    row: int
    token_ids: torch.Tensor
    logprobs: Mapping[str, Any]

    @property
    def token(self) -> int:
        """The token of the row."""
        return int(self.token_ids[self.row])


@dataclass(eq=False)
class ScheduledRequest:
    """A request in the batch, in the queue after it was retracted, or finished.

    Attributes:
        request: SGLang's `Req`; weak, because SGLang's requests die by their reference count.
        rid: the request id.
        prompt_token_ids: the prompt.
        uses: its processors; None until its first token is sampled.
        params: its sampling parameters with its processors.
        output_token_ids: its output tokens, all of them known. Always the same list, but for accepted draft tokens.
        fault: the reason to end it; None while it runs.
        called_at: number of output tokens at its processors' last call.
        sampled: what SGLang sampled in the step of that call.
    """

    request: weakref.ReferenceType[Any]
    rid: str
    prompt_token_ids: list[int]
    uses: tuple[ProcessorUse, ...] | None = None
    params: SamplingParams | None = None
    output_token_ids: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None
    called_at: int = -1
    sampled: SampledRow | None = None

    @property
    def is_finished(self) -> bool:
        """True if SGLang has finished the request, or dropped it."""
        request = self.request()
        return request is None or bool(request.finished())

    def take_new_tokens(self, known: Sequence[int], length: int, last: int) -> None:
        """Append the output tokens since the last step.

        Args:
            known: the tokens that the scheduler has processed. With overlap scheduling, the last one is missing.
            length: number of output tokens that this step continues.
            last: the last token that the model read.
        """
        own = self.output_token_ids
        own.extend(known[len(own) : length])
        if len(own) == length - 1:
            own.append(last)
        if len(own) != length:
            self.fail(f"SGLang continues output token {length} of it, of which {len(own)} are known")

    def with_draft(self, token: int) -> ScheduledRequest:
        """Return the state of the request if SGLang accepts a draft token.

        Its processors must have been called for the token, and their state is copied: SGLang verifies all draft tokens
        of a step at once, after the processors have edited the logits behind each of them.
        """
        assert self.uses is not None
        assert self.params is not None
        output = [*self.output_token_ids, token]
        draft = replace(self, uses=None, params=None, output_token_ids=output, called_at=-1, sampled=None)
        try:
            draft.uses = fork_uses(self.uses, output)
            draft.params = self.params.with_checked(processors=draft.uses)
        except ProcessorFault as fault:
            draft.fault = fault
        return draft

    def accept(self, draft: ScheduledRequest) -> None:
        """Continue as a draft that SGLang accepted."""
        if draft.uses is not None:  # else its state could not be copied
            self.uses, self.params = draft.uses, draft.params
        self.output_token_ids, self.called_at, self.fault = draft.output_token_ids, draft.called_at, draft.fault

    def fail(self, reason: str) -> None:
        """End the request for a reason that is not its processor's fault. The first reason counts."""
        self.fault = self.fault or ProcessorFault(reason, digest="", name="", kind="load")


def scheduled(request: Any) -> ScheduledRequest:
    """Return the plugin's record of a request, a new one at first.

    Args:
        request: SGLang's `Req`.
    """
    known = request.__dict__.get(_ATTRIBUTE)
    if known is None:
        known = ScheduledRequest(weakref.ref(request), request.rid, list(request.origin_input_ids))
        setattr(request, _ATTRIBUTE, known)
    assert isinstance(known, ScheduledRequest)
    return known


def find_scheduled(request: Any) -> ScheduledRequest | None:
    """Return the plugin's record of a request; None if no step has met it.

    Args:
        request: SGLang's `Req`.
    """
    found = request.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ScheduledRequest) else None


def has_ended(request: Any, output_token_ids: Sequence[int]) -> bool:
    """Return whether a request is complete with these tokens.

    With overlap scheduling, SGLang computes one more step before it finds out.

    Args:
        request: SGLang's `Req`.
        output_token_ids: its output tokens.
    """
    params = request.sampling_params
    if params.max_new_tokens is not None and len(output_token_ids) >= params.max_new_tokens:
        return True
    if not output_token_ids or params.ignore_eos:
        return False
    return output_token_ids[-1] in _eos_token_ids(request)


def _eos_token_ids(request: Any) -> set[int]:
    ends = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if request.tokenizer is not None:
        ends.add(request.tokenizer.eos_token_id)
        ends.update(request.tokenizer.additional_stop_token_ids or ())
    return ends
