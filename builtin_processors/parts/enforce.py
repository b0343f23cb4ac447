"""Enforces tokens like NVIDIA's logits-processor-zoo: by raising their logits above all others, without -inf."""

from __future__ import annotations

import torch


def enforce(logits: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor | None = None) -> None:
    """Raise given tokens of each row above all others, in place.

    The lowest enforced token gets the row's highest logit, the other enforced tokens keep their distance to it, and all
    remaining tokens get the row's lowest logit. So the strength of this preference is the range of the row's logits,
    and it has no effect in a row with equal logits.

    Forcing respects masks: -inf remains -inf. The other tokens are enforced; a row in which none is left is unchanged.
    (The original returns NaN.)

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows, any], the tokens to enforce. May contain duplicates, as padding.
        active: bool [rows], the rows to edit; None for all.
    """
    if active is None or logits.device.type != "cpu":
        _enforce(logits, tokens, active)
        return
    # On a CPU, reading `active` does not require synchronization. Usually no row is active, and writing all logits
    # takes ten times as long as reading them.
    rows = active.nonzero().squeeze(1)
    if len(rows):
        chosen = logits[rows]
        _enforce(chosen, tokens[rows], None)
        logits[rows] = chosen


def _enforce(logits: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor | None) -> None:
    """Implement `enforce` without reading `active` on the host, which would synchronize with the device."""
    enforced = logits.gather(1, tokens)
    least = enforced.masked_fill(enforced == -torch.inf, torch.inf).amin(1, keepdim=True)
    raised = enforced + (logits.amax(1, keepdim=True) - least)
    possible = least < torch.inf
    if active is not None:
        possible &= active.unsqueeze(1)
    torch.where(possible, logits.amin(1, keepdim=True), logits, out=logits)
    logits.scatter_(1, tokens, torch.where(possible, raised, enforced))


def argmax_is_among(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return whether each row's argmax is one of its tokens. Among equal logits, the lowest id is the argmax.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows, any]; -1 is never the argmax.

    Returns:
        bool [rows].
    """
    if logits.device.type != "cpu":
        return (logits.argmax(1, keepdim=True) == tokens).any(1)
    # On a CPU, argmax takes twenty times as long as amax. So only compute it for rows in which it can be among them.
    highest = logits.amax(1, keepdim=True)
    among = ((logits.gather(1, tokens.clamp(min=0)) == highest) & (tokens >= 0)).any(1)
    rows = among.nonzero().squeeze(1)
    if len(rows):
        among[rows] = (logits[rows].argmax(1, keepdim=True) == tokens[rows]).any(1)
    return among
