"""Forcing a row's next token the way NVIDIA's logits-processor-zoo does: by distance, without -inf."""

from __future__ import annotations

import torch


def enforce(logits: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor | None = None) -> None:
    """Raise some tokens of each row above all others, in place.

    The lowest of the enforced tokens gets the row's highest logit, the others of them keep their distance to it, and
    every other token of the vocabulary gets the row's lowest logit. So this is a preference, as strong as the row's
    logits are apart, and none at all in a row whose logits are all the same.

    What is -inf stays -inf: forcing obeys masks. The tokens that are left are enforced; a row in which none is left
    stays as it is. (The original gives NaN.)

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows, any], the tokens to enforce. One may stand there twice, to fill up a shorter row.
        active: bool [rows], the rows in which to do it; None: in all.
    """
    if active is None or logits.device.type != "cpu":
        _enforce(logits, tokens, active)
        return
    # On a CPU the host knows at once which rows these are. Most of the time there are none, and writing all of the
    # logits takes ten times as long as to read them.
    rows = active.nonzero().squeeze(1)
    if len(rows):
        chosen = logits[rows]
        _enforce(chosen, tokens[rows], None)
        logits[rows] = chosen


def _enforce(logits: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor | None) -> None:
    """`enforce` without a look at `active`: the host need not wait for a device."""
    enforced = logits.gather(1, tokens)
    least = enforced.masked_fill(enforced == -torch.inf, torch.inf).amin(1, keepdim=True)
    raised = enforced + (logits.amax(1, keepdim=True) - least)
    possible = least < torch.inf
    if active is not None:
        possible &= active.unsqueeze(1)
    torch.where(possible, logits.amin(1, keepdim=True), logits, out=logits)
    logits.scatter_(1, tokens, torch.where(possible, raised, enforced))


def argmax_is_among(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether each row's argmax is one of its tokens. Of equal logits, the token with the lowest id is the argmax.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows, any]; -1 is never the argmax.

    Returns:
        bool [rows].
    """
    if logits.device.type != "cpu":
        return (logits.argmax(1, keepdim=True) == tokens).any(1)
    # PyTorch's argmax takes twenty times as long as its maximum on a CPU. It is asked only where it can be among them.
    highest = logits.amax(1, keepdim=True)
    among = ((logits.gather(1, tokens.clamp(min=0)) == highest) & (tokens >= 0)).any(1)
    rows = among.nonzero().squeeze(1)
    if len(rows):
        among[rows] = (logits[rows].argmax(1, keepdim=True) == tokens[rows]).any(1)
    return among
