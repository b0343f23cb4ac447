"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
) -> None:
    """Penalize tokens that a sequence already contains, in place.

    First the repetition penalty (CTRL, Keskar et al. 2019, arXiv:1909.05858; as in Hugging Face transformers: positive
    logits are divided by it, the others multiplied), then the frequency penalty times the count in the output, then
    the presence penalty where that count is above 0 (OpenAI's definitions).

    Works on the distinct tokens of the sequences, not on the vocabulary: all arguments but the first are lists of
    equal length, with one entry for each distinct token of each penalized row.

    Args:
        logits: float32 [rows, vocab].
        rows: int64 [entries].
        token_ids: int64 [entries]; each (row, token) pair is unique.
        output_counts: float32 [entries]; 0 for a token that occurs only in the prompt.
        repetition_penalty: float32 [entries], above 0.
        frequency_penalty: float32 [entries].
        presence_penalty: float32 [entries].
    """
    old = logits[rows, token_ids]
    new = torch.where(old > 0, old / repetition_penalty, old * repetition_penalty)
    new -= frequency_penalty * output_counts
    new -= presence_penalty * (output_counts > 0)
    logits[rows, token_ids] = new
