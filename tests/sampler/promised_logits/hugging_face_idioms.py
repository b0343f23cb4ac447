"""Idioms of processors for Hugging Face's `generate`: of Transformers itself, its forum, and blogs."""

# ruff: noqa: ANN001, ANN201  # short, as people write them

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

Idiom = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
INF = float("inf")
BANNED = [5, 7, 11]
ALLOWED = [20, 21, 22, 40]
EOS = 1


def min_length(input_ids, scores):
    if input_ids.shape[-1] < 1000:
        scores[:, EOS] = -INF
    return scores


def min_length_of_transformers(input_ids, scores):
    vocab = torch.arange(scores.shape[-1], device=scores.device)
    mask = torch.isin(vocab, torch.tensor([EOS], device=scores.device))
    scores_processed = scores.clone()
    if input_ids.shape[-1] < 1000:
        scores_processed = torch.where(mask, -INF, scores)
    return scores_processed


def temperature(input_ids, scores):
    return scores / 0.7


def temperature_by_row(input_ids, scores):
    temperatures = torch.linspace(0.5, 1.5, scores.shape[0])
    return scores / temperatures[:, None]


def suppress_tokens(input_ids, scores):
    vocab = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(torch.isin(vocab, torch.tensor(BANNED)), -INF, scores)


def suppress_at_begin(input_ids, scores):
    if input_ids.shape[-1] == 1:
        scores[:, BANNED] = -INF
    return scores


def forced_token(input_ids, scores):
    scores = torch.full_like(scores, -INF)
    scores[:, 7] = 0
    return scores


def forced_token_by_comprehension(input_ids, scores):
    scores[:, [i for i in range(scores.shape[1]) if i != 7]] = -INF
    scores[:, 7] = 0
    return scores


def prefix_constraint(input_ids, scores):
    mask = torch.full_like(scores, -INF)
    for row, sent in enumerate(input_ids):
        mask[row, ALLOWED[: 1 + len(sent) % 3]] = 0
    return scores + mask


def allowed_only(input_ids, scores):
    mask = torch.ones(scores.shape[-1], dtype=torch.bool)
    mask[ALLOWED] = False
    return scores.masked_fill(mask, -INF)


def allowed_only_in_place(input_ids, scores):
    mask = torch.ones_like(scores, dtype=torch.bool)
    mask[:, ALLOWED] = False
    scores.masked_fill_(mask, -INF)
    return scores


def allowed_by_copy(input_ids, scores):
    allowed = torch.full_like(scores, -INF)
    allowed[:, ALLOWED] = scores[:, ALLOWED]
    return allowed


def allowed_by_clone(input_ids, scores):
    kept = scores[:, ALLOWED].clone()
    scores[:] = -INF
    scores[:, ALLOWED] = kept
    return scores


def sequence_bias(input_ids, scores):
    bias = torch.zeros_like(scores)
    bias[:, BANNED] += 2.5
    return scores + bias


def length_1_bias_of_transformers(input_ids, scores):
    bias = torch.zeros((scores.shape[1],), dtype=torch.float)
    bias[BANNED] = torch.tensor([1.0, -2.0, 0.5])
    return scores + bias.unsqueeze(0)


def bad_words_of_transformers(input_ids, scores):
    bias = torch.zeros(scores.shape[-1])
    bias[BANNED] = -INF
    return scores + bias


def bias_by_index_add(input_ids, scores):
    scores.index_add_(1, torch.tensor(BANNED), torch.full((scores.shape[0], 3), 1.5))
    return scores


def no_repeat_ngram(input_ids, scores):
    scores_processed = scores.clone()
    for i, row in enumerate(input_ids.tolist()):
        banned = [b for a, b in itertools.pairwise(row) if a == row[-1]]
        scores_processed[i, banned] = -INF
    return scores_processed


def repetition_penalty(input_ids, scores):
    score = torch.gather(scores, 1, input_ids)
    score = torch.where(score < 0, score * 1.2, score / 1.2)
    return scores.scatter(1, input_ids, score)


def presence_penalty(input_ids, scores):
    for i in range(scores.shape[0]):
        scores[i, input_ids[i].unique()] -= 0.5
    return scores


def frequency_penalty(input_ids, scores):
    counts = torch.zeros_like(scores)
    counts.scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
    return scores - 0.3 * counts


def encoder_ids(input_ids, scores):
    scores[:, input_ids.unique()] *= 1.1
    return scores


def exponential_decay(input_ids, scores):
    penalties = torch.zeros_like(scores)
    penalties[:, EOS] = torch.abs(scores[:, EOS]) * (1.01 ** input_ids.shape[-1] - 1)
    return scores + penalties


def top_k(input_ids, scores):
    to_remove = scores < torch.topk(scores, 5)[0][..., -1, None]
    return scores.masked_fill(to_remove, -INF)


def top_p(input_ids, scores):
    sorted_logits, sorted_indices = torch.sort(scores, descending=False)
    remove = sorted_logits.softmax(dim=-1).cumsum(dim=-1) <= 0.1
    return scores.masked_fill(remove.scatter(1, sorted_indices, remove), -INF)


def min_p(input_ids, scores):
    probs = torch.softmax(scores, dim=-1)
    return scores.masked_fill(probs < 0.1 * probs.amax(dim=-1, keepdim=True), -INF)


def typical(input_ids, scores):
    normalized = torch.nn.functional.log_softmax(scores, dim=-1)
    entropy = -(normalized * normalized.exp()).nansum(-1, keepdim=True)
    return scores.masked_fill((-normalized - entropy).abs() > 3.0, -INF)


def renormalize(input_ids, scores):
    return scores.log_softmax(dim=-1)


def infinity_and_nan(input_ids, scores):
    processed = torch.where(scores != scores, 0.0, scores)
    return torch.where(processed == INF, torch.finfo(scores.dtype).max, processed)


def watermark(input_ids, scores):
    for i, row in enumerate(input_ids.tolist()):
        green = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(row[-1]))
        scores[i, green[: scores.shape[-1] // 4]] += 2.0
    return scores


def watermark_by_mask(input_ids, scores):
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for i, row in enumerate(input_ids.tolist()):
        mask[i, [(row[-1] + 1) % mask.shape[1], (row[-1] + 2) % mask.shape[1]]] = True
    scores[mask] = scores[mask] + 2.0
    return scores


def guidance_by_numpy(input_ids, scores):
    values = scores.numpy()
    values[:, np.array(BANNED)] = -np.inf
    return scores


def by_numpy_indices(input_ids, scores):
    scores[:, np.array(BANNED)] = -np.inf
    return scores


def row_by_row_mask(input_ids, scores):
    for row, sent in zip(scores, input_ids.tolist(), strict=True):
        mask = torch.ones(row.shape[0], dtype=torch.bool)
        mask[ALLOWED] = len(sent) < 5
        row[mask] = -INF
    return scores


def one_row_at_a_time(input_ids, scores):
    result = []
    for row in scores:
        row = row.clone()
        row[BANNED] = -INF
        result.append(row)
    return torch.stack(result)


def stop_after(input_ids, scores):
    for i in range(input_ids.shape[0]):
        if input_ids.shape[-1] > 3 and input_ids[i, -1] != EOS:
            scores[i, :] = torch.finfo(scores.dtype).min
            scores[i, EOS] = 0
    return scores


def list_of_tensors(input_ids, scores):
    for i in range(scores.shape[0]):
        scores[i, [input_ids[i, 0], input_ids[i, 3]]] = -INF
    return scores


def nothing(input_ids, scores):
    return scores


IDIOMS: dict[str, Idiom] = {
    name: value for name, value in globals().items() if callable(value) and getattr(value, "__module__", "") == __name__
}
