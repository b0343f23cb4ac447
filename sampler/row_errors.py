"""The errors of rows without a usable logit."""

from __future__ import annotations

from collections.abc import Sequence

from logitship.client.errors import LogitshipError


class NoTokenLeftError(LogitshipError):
    """Every token of the row is forbidden.

    Args:
        forbidding: names of the request's fields and processors that forbid tokens.
    """

    def __init__(self, forbidding: Sequence[str] = ()) -> None:
        who = ", ".join(forbidding) or "the model or an installed batch processor"
        super().__init__(
            f"no token is left to sample: every logit is -inf. Together, {who} forbid the whole vocabulary: forbid less"
        )


class NonFiniteLogitsError(LogitshipError):
    """The row has a logit that is NaN or +inf, or was left without a finite one after the temperature.

    Args:
        processors: names of the request's processors.
        was_checked: True if the logits were finite before the processors that run after the temperature.
    """

    def __init__(self, processors: Sequence[str] = (), *, was_checked: bool = False) -> None:
        who = ", ".join(["logit_bias", "a penalty", "an installed batch processor", *processors])
        super().__init__(
            "an installed batch processor, which runs after the temperature, left NaN, +inf or no finite logit"
            if was_checked
            else f"the logits contain NaN or +inf: either the model's own do, or one of {who} exceeded float32's range"
        )


class SamplingMaskTooLongError(LogitshipError):
    """More tokens could be sampled than a mask that is returned as a list may have."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"return_sampling_mask: {length} tokens could be sampled, and a list has at most {limit}: lower top_k, or "
            "ask for sampling_mask_format packed"
        )


class SamplingEditsTooLongError(LogitshipError):
    """A recorded edit names more tokens than it may."""

    def __init__(self, name: str, length: int, limit: int) -> None:
        super().__init__(
            f"return_sampling_edits: {name} changed the logits of {length} tokens that could be sampled, and an edit "
            f"names at most {limit}: lower top_k or top_p"
        )


class SamplingMasksTooLargeError(LogitshipError):
    """The packed masks and edits of a sequence are too large."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"return_sampling_mask: the packed masks and edits exceed {limit} bytes: use top_k or top_p, or generate "
            "fewer tokens"
        )
