"""A request with processors in vLLM's batch, as the plugin keeps it from its first step to its last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from logitship.client.errors import ProcessorFault
from logitship.sampler.sampling_params import SamplingParams

PLACEHOLDER = -1
"""vLLM's value for a token that was sampled and is not known yet."""
INTERNAL_ERROR = "the server had an internal error; its log has the details"
"""Reason of a request that ends because of an error of the plugin or of vLLM."""


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
        params: its sampling parameters with its loaded processors; None if they could not be loaded.
        hard_masks: names of vLLM's masks that apply to it: tokens that they forbid stay forbidden.
        output_token_ids: its output tokens, all of them known. Always the same list.
        fault: the reason to end it; None while it runs.
        reported: the fault is in the log.
    """

    record: Any
    rid: str
    num_prompt_tokens: int
    live: list[int]
    ends_at: frozenset[int]
    params: SamplingParams | None = None
    hard_masks: tuple[str, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None
    reported: bool = False

    @property
    def runs(self) -> bool:
        """False if it has ended or has to end: vLLM may compute one step more than it needs."""
        if self.fault is not None or self.params is None:
            return False
        output, limit = self.output_token_ids, self.params.max_tokens
        return len(output) != limit and not (output and output[-1] in self.ends_at)

    def take_new_tokens(self) -> None:
        """Append the output tokens that vLLM has added since the last step."""
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

    def fail(self, reason: str) -> None:
        """End the request for a reason that is not its processor's fault. The first reason counts."""
        self.fault = self.fault or ProcessorFault(reason, digest="", name="", kind="load")


def track(record: Any, params: Any, live: list[int], eos_token_ids: frozenset[int]) -> TrackedRequest:
    """Return a new request, without its processors.

    Args:
        record: the model runner's.
        params: vLLM's `SamplingParams`.
        live: vLLM's list of output tokens.
        eos_token_ids: the model's end tokens.
    """
    stops = set(params.stop_token_ids or ())
    ends_at = frozenset(stops if params.ignore_eos else stops | eos_token_ids)
    # vLLM applies these masks to the logits before it calls any logits processor, and not again after.
    masks = tuple(name for name in ("structured_outputs", "allowed_token_ids", "bad_words") if getattr(params, name))
    return TrackedRequest(record, record.req_id, record.num_prompt_tokens, live, ends_at, hard_masks=masks)


def failed_request(live: list[int]) -> TrackedRequest:
    """Return a placeholder for a request that could not be tracked. It holds the row until the request has ended."""
    request = TrackedRequest(None, "(unknown)", 0, live, frozenset())
    request.fail(INTERNAL_ERROR)
    return request
