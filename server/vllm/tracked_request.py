"""A request in vLLM's batch that carries processors, as the plugin keeps it from its first step to its last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from logitship.client.errors import ProcessorFault
from logitship.sampler.sampling_params import SamplingParams

PLACEHOLDER = -1
"""What vLLM writes for a token that was drawn and is not known yet."""
INTERNAL_ERROR = "the server had an internal error; its log has the details"
"""Why a request ends that nobody can say more about."""


@dataclass(eq=False)
class TrackedRequest:
    """See the module's text.

    Attributes:
        record: the model runner's own record of it.
        rid: the request id.
        num_prompt_tokens: it changes where a client sends a prompt in pieces: each piece is a sequence of its own.
        live: vLLM's list of its output tokens. It may end in placeholders, and another one may take its place.
        ends_at: tokens that end it.
        params: what its processors see, and the processors; None if they could not be loaded.
        obeys: names of its other masks: what they forbade stays forbidden.
        output_token_ids: its output tokens, all of them known. Always the same list.
        fault: why it is being ended, if it is.
        reported: the operator was told.
    """

    record: Any
    rid: str
    num_prompt_tokens: int
    live: list[int]
    ends_at: frozenset[int]
    params: SamplingParams | None = None
    obeys: tuple[str, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None
    reported: bool = False

    @property
    def runs(self) -> bool:
        """False if it is being ended, or ended: vLLM may compute a step more than it needs."""
        if self.fault is not None or self.params is None:
            return False
        output, limit = self.output_token_ids, self.params.max_tokens
        return len(output) != limit and not (output and output[-1] in self.ends_at)

    def follow(self) -> None:
        """Take over the tokens that came."""
        known = len(self.output_token_ids)
        new = self.live[known:]
        if len(self.live) < known:
            self.fail("vLLM took back tokens of its output, which its processors cannot follow")
        elif PLACEHOLDER in new:
            self.fail("vLLM does not say which tokens were drawn; start it with --logits-processors, see docs/vllm.md")
        else:
            self.output_token_ids += new

    def fail(self, reason: str) -> None:
        """End it, for a reason that is not a processor's."""
        self.fault = self.fault or ProcessorFault(reason, digest="", name="", kind="load")


def carrying(record: Any, params: Any, live: list[int], eos_token_ids: frozenset[int]) -> TrackedRequest:
    """A request that came.

    Args:
        record: the model runner's.
        params: vLLM's `SamplingParams`.
        live: vLLM's list of output tokens.
    """
    stops = set(params.stop_token_ids or ())
    ends_at = frozenset(stops if params.ignore_eos else stops | eos_token_ids)
    # vLLM's logits have these masks before any logits processor sees them, and not after.
    obeys = tuple(name for name in ("structured_outputs", "allowed_token_ids", "bad_words") if getattr(params, name))
    return TrackedRequest(record, record.req_id, record.num_prompt_tokens, live, ends_at, obeys=obeys)


def failed(live: list[int]) -> TrackedRequest:
    """What stands in the row of a request that could not be taken in, until it has ended."""
    request = TrackedRequest(None, "(unknown)", 0, live, frozenset())
    request.fail(INTERNAL_ERROR)
    return request
