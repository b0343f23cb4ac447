"""A request with processors in vLLM's batch, as the plugin keeps it from its first step to its last."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.processor_groups import ProcessorUse, fork_uses, uses_of
from logitship.sampler.sampling_params import SamplingParams

PLACEHOLDER = -1
"""vLLM's value for a token that was sampled and is not known yet."""
INTERNAL_ERROR = "the server had an internal error; its log has the details"
"""Reason of a request that ends because of an error of the plugin or of vLLM."""
HOLDS_EMBEDDINGS = "its prompt holds embeddings, which processors cannot read"
"""Reason of a request whose prompt is not known as tokens."""


@dataclass(eq=False)
class TrackedRequest:
    """A request in the batch, or preempted.

    Attributes:
        record: the model runner's own record of it.
        rid: the request id.
        num_prompt_tokens: length of the prompt. It changes when a client sends the prompt in pieces: each piece is a
            sequence of its own.
        live: vLLM's list of its output tokens. It may end in placeholders, and vLLM may replace it.
        ends_at: tokens that end it.
        loaded: its sampling parameters with its loaded processors; None if they could not be loaded.
        params: the same with the current uses of the processors: those of the last accepted draft token; None if it
            runs no more.
        hard_masks: names of vLLM's masks that apply to it: tokens that they forbid stay forbidden.
        output_token_ids: its output tokens, all of them known. Always the same list.
        fault: the reason to end it; None while it runs.
        reported: the fault is in the log.
        is_draft: it is a continuation with draft tokens, which may be rejected.
        may_stop_early: a token that its processors forbid is never sampled, so that nothing behind such a draft counts.
        continuations: its state if its first draft token is accepted, its first two, and so on.
    """

    record: Any
    rid: str
    num_prompt_tokens: int
    live: list[int]
    ends_at: frozenset[int]
    loaded: SamplingParams | None = None
    params: SamplingParams | None = None
    hard_masks: tuple[str, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None
    reported: bool = False
    is_draft: bool = False
    may_stop_early: bool = True
    continuations: list[TrackedRequest] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """False if it has ended or has to end: vLLM may compute one step more than it needs."""
        if self.fault is not None or self.params is None:
            return False
        output, limit = self.output_token_ids, self.params.max_tokens
        return len(output) != limit and not (output and output[-1] in self.ends_at)

    @property
    def last(self) -> TrackedRequest:
        """The continuation with the most draft tokens, or this request."""
        return self.continuations[-1] if self.continuations else self

    def add_draft(self, token: int) -> TrackedRequest:
        """Return the state of the request if one more draft token is accepted.

        Its processors must have been called for the token, and its state is copied: vLLM verifies all draft tokens of a
        step at once, after the processors have edited the logits behind each of them.
        """
        last = self.last
        assert last.params is not None
        output = [*last.output_token_ids, token]
        draft = replace(self, params=None, output_token_ids=output, is_draft=True, reported=False, continuations=[])
        try:
            draft.params = last.params.with_checked(processors=fork_uses(uses_of(last.params), output))
        except ProcessorFault as fault:
            draft.fault = fault
        self.continuations.append(draft)
        return draft

    def take_new_tokens(self) -> list[ProcessorUse]:
        """Append the output tokens that vLLM has added since the last step.

        Returns:
            Uses that have no next call: those of rejected draft tokens, and of the states before accepted ones.
        """
        superseded = self._verify() if self.continuations and len(self.live) > len(self.output_token_ids) else []
        known = len(self.output_token_ids)
        new = self.live[known:]
        if len(self.live) < known:
            self.fail("vLLM took back tokens of its output, which its processors cannot follow")
        elif PLACEHOLDER in new:
            self.fail(
                "vLLM does not say which tokens were sampled; start it with --logits-processors, see docs/vllm.md"
            )
        else:
            self.output_token_ids += new
        return superseded

    def _verify(self) -> list[ProcessorUse]:
        """Continue from the last accepted draft token. The token after it was sampled with its processors."""
        num_accepted = len(self.live) - len(self.output_token_ids) - 1
        states, self.continuations = [self, *self.continuations], []
        uses = [use for state in states if state.params is not None for use in uses_of(state.params)]
        if num_accepted >= len(states):
            if not states[-1].runs and states[-1].fault is None:  # it has ended, and vLLM drops what follows
                self.params = None
                return uses
            self.fail("vLLM accepted a draft token behind which no processor was called")
            return []
        accepted = states[num_accepted]
        if accepted.output_token_ids != self.live[:-1]:
            self.fail("vLLM's output has other tokens than the drafts that its processors were called for")
            return []
        self.output_token_ids, self.params = accepted.output_token_ids, accepted.params
        self.fault, self.reported = accepted.fault, accepted.reported
        kept = () if self.params is None else uses_of(self.params)
        return [use for use in uses if use not in kept]

    def fail(self, reason: str) -> None:
        """End the request for a reason that is not its processor's fault. The first reason counts."""
        self.fault = self.fault or ProcessorFault(reason, digest="", name="", kind="load")


def track(record: Any, params: Any, live: list[int], eos_token_ids: frozenset[int]) -> TrackedRequest:
    """Return a new request, without its processors.

    Args:
        record: the model runner's.
        params: vLLM's `SamplingParams`.
        live: vLLM's list of output tokens.
        eos_token_ids: the model's EOS tokens.
    """
    stops = set(params.stop_token_ids or ())
    ends_at = frozenset(stops if params.ignore_eos else stops | eos_token_ids)
    # vLLM applies these masks to the logits before it calls any logits processor, and not again after.
    masks = tuple(name for name in ("structured_outputs", "allowed_token_ids", "bad_words") if getattr(params, name))
    # vLLM's thinking budget forces its tokens after the processors, also those that they forbid.
    may_stop_early = getattr(params, "thinking_token_budget", None) is None
    return TrackedRequest(
        record,
        record.req_id,
        record.num_prompt_tokens,
        live,
        ends_at,
        hard_masks=masks,
        may_stop_early=may_stop_early,
    )


def failed_request(live: list[int]) -> TrackedRequest:
    """Return a placeholder for a request that could not be tracked. It holds the row until the request has ended."""
    request = TrackedRequest(None, "(unknown)", 0, live, frozenset())
    request.fail(INTERNAL_ERROR)
    return request
