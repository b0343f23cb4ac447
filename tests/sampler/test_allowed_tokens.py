from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.allowed_tokens import AllowedTokens, mask_of

VOCAB = 70  # not a multiple of 32

tokens = st.sets(st.integers(0, VOCAB - 1))
steps = st.lists(st.tuples(st.sampled_from(["keep", "keep_mask", "forbid"]), tokens), max_size=5)


@given(steps, st.integers(1, 5))
def test_tokens_left(steps: list[tuple[str, set[int]]], count: int) -> None:
    allowed = AllowedTokens(VOCAB)
    left = set(range(VOCAB))
    for name, token_ids in steps:
        if name == "forbid":
            left -= token_ids
            allowed.forbid(token_ids)
        else:
            left &= token_ids
            allowed.keep(token_ids) if name == "keep" else allowed.keep_mask(mask_of(token_ids, VOCAB))
    if steps and all(name == "forbid" for name, _ in steps):
        assert allowed.single() is allowed.at_most(count) is None  # nobody forbids all tokens but a few by naming them
    elif steps:
        found = allowed.at_most(count)
        assert found is None if len(left) > count else sorted(found or []) == sorted(left)
        assert allowed.single() == (left.pop() if len(left) == 1 else None)


def test_nothing_is_single_if_the_logits_decide() -> None:
    allowed = AllowedTokens(VOCAB)
    allowed.keep([3])
    assert allowed.single() == 3
    allowed.leave_open()
    assert allowed.single() is None
    assert list(allowed.likely) == []


def test_first_guess_counts() -> None:
    allowed = AllowedTokens(VOCAB)
    for guess in ([], [4, 5], [6]):
        allowed.expect(guess)
    assert allowed.likely == [4, 5]
    assert allowed.single() is None


@pytest.mark.parametrize("padding", [0, 2])
def test_mask_of_a_padded_vocabulary(padding: int) -> None:
    """Tokens that the model does not have are no tokens."""
    words = np.append(mask_of([8], VOCAB), np.full(padding, -1, np.int32))
    words[-1 - padding] |= np.int32(-1 << 10)
    allowed = AllowedTokens(VOCAB)
    allowed.keep_mask(words)
    assert allowed.single() == 8


def test_masks_of_different_lengths() -> None:
    """The mask of a grammar is as long as the tokenizer's vocabulary, which may be larger than the model's."""
    allowed = AllowedTokens(VOCAB)
    allowed.keep_mask(mask_of([5, 8, VOCAB + 40], VOCAB + 60))
    allowed.keep_mask(mask_of([8, 9], VOCAB))
    assert allowed.single() == 8


@given(tokens)
def test_mask_has_a_bit_for_each_token(token_ids: set[int]) -> None:
    words = mask_of(token_ids, VOCAB)
    assert {token for token in range(VOCAB) if int(words[token // 32]) >> token % 32 & 1} == token_ids
