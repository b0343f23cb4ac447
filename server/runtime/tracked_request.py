"""A request with processors in an engine, from its first step to its last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.processor_groups import ProcessorUse, fork_uses, uses_of
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import ProcessorRequest

INTERNAL_ERROR = "the server had an internal error; its log has the details"
"""Reason of a request that ends because of an error of the plugin or of the engine."""


@dataclass(eq=False)
class TrackedRequest:
    """A request in the batch, or preempted; or its state behind a draft token.

    Attributes:
        record: the adapter's or the engine's own record of it.
        rid: the request id.
        prompt_token_ids: the prompt.
        ends_at: tokens that end it.
        tenant: who sent it.
        max_tokens: most output tokens; None: no limit.
        requested: the processors that it asks for; none before they are read, or if they cannot be.
        params: its sampling parameters with its processors; None until they are loaded, or if they cannot be.
        output_token_ids: its output tokens, all of them known. The same list until draft tokens are accepted.
        fault: the reason to end it; None while it runs.
        called_at: number of output tokens at its processors' last call.
        follows_forbidden: the engine may accept a draft token that the processors forbid.
        drafts: its state behind each draft token that its processors were called for, or that ends it.
        is_reported: its fault is in the log.
    """

    record: Any
    rid: str
    prompt_token_ids: list[int]
    ends_at: frozenset[int] = frozenset()
    tenant: str = ""
    max_tokens: int | None = None
    requested: Sequence[ProcessorRequest] = ()
    params: SamplingParams | None = None
    output_token_ids: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None
    called_at: int = -1
    follows_forbidden: bool = False
    drafts: dict[int, TrackedRequest] = field(default_factory=dict)
    is_reported: bool = False

    @property
    def uses(self) -> tuple[ProcessorUse, ...]:
        """Its processors; none until they are loaded."""
        return () if self.params is None else uses_of(self.params)

    @property
    def is_complete(self) -> bool:
        """True if its last token ends it. An engine may compute one step more before it finds out."""
        output = self.output_token_ids
        return (self.max_tokens is not None and len(output) >= self.max_tokens) or (
            bool(output) and output[-1] in self.ends_at
        )

    @property
    def runs(self) -> bool:
        """True if its processors are to be called for its next token."""
        return self.fault is None and self.params is not None and not self.is_complete

    @property
    def states(self) -> Iterator[TrackedRequest]:
        """The request, and its states behind draft tokens."""
        yield self
        for draft in self.drafts.values():
            yield from draft.states

    def add_draft(self, token: int) -> TrackedRequest:
        """Return the state of the request if the engine accepts a draft token.

        Its processors must have been called for the token, and their state is copied: engines verify all draft tokens
        of a step at once, after the processors have edited the logits behind each of them.
        """
        output = [*self.output_token_ids, token]
        draft = replace(
            self, params=None, output_token_ids=output, fault=None, called_at=-1, drafts={}, is_reported=False
        )
        self.drafts[token] = draft
        if not draft.is_complete:
            assert self.params is not None
            try:
                draft.params = self.params.with_checked(processors=fork_uses(self.uses, output))
            except ProcessorFault as fault:
                draft.fault = fault
        return draft

    def accept(self, tokens: Sequence[int], engine: str) -> list[ProcessorUse]:
        """Continue behind the draft tokens that the engine accepted. Those behind the end of the request are dropped.

        Args:
            tokens: the accepted tokens, in order.
            engine: its name, for a message.

        Returns:
            Processors without a next call: those behind the other draft tokens, and those before the accepted ones.
        """
        uses = [use for state in self.states for use in state.uses]
        last, params = self, self.params
        for token in tokens:
            if last.fault is not None or last.is_complete:
                break
            if token not in last.drafts:
                last.fail(f"{engine} accepted a draft token behind which no processor was called")
                break
            last = last.drafts[token]
            params = last.params or params
        if last is not self:
            self.output_token_ids, self.called_at = last.output_token_ids, last.called_at
            self.fault, self.is_reported = last.fault, last.is_reported
            self.params = params
        self.drafts = {}
        return [use for use in uses if use not in self.uses]

    def fail(self, reason: str, kind: str = "load") -> None:
        """End the request for a reason that is not its processor's fault. The first reason counts."""
        self.fault = self.fault or ProcessorFault(reason, digest="", name="", kind=kind)
