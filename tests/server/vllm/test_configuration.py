from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.server.vllm.configuration import fault_token, model_view


class FakeTokenizer:
    """A tokenizer with `size` tokens, some of them special."""

    def __init__(self, size: int, special: set[int]) -> None:
        self.added_tokens_decoder = {token: SimpleNamespace(special=True) for token in special}
        self.all_special_ids = sorted(special)[:1]
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self._size)}


def test_fault_token_prefers_a_column_without_a_token() -> None:
    assert fault_token(ModelView(10, frozenset({0}), FakeTokenizer(8, {0, 3}))) == 9


def test_fault_token_then_prefers_a_special_token_that_does_not_end() -> None:
    assert fault_token(ModelView(8, frozenset({5}), FakeTokenizer(8, {0, 3, 5}))) == 3
    assert fault_token(ModelView(8, frozenset({5}), FakeTokenizer(12, {0, 3, 5, 11}))) == 3


def test_fault_token_defaults_to_the_last_token() -> None:
    assert fault_token(ModelView(8, frozenset({5}), FakeTokenizer(8, {5}))) == 7
    assert fault_token(ModelView(8, frozenset({5}), None)) == 7


@pytest.mark.parametrize(("generation_config", "expected"), [({}, set()), ({"eos_token_id": 4}, {4})])
def test_model_view_without_tokenizer(generation_config: dict[str, Any], expected: set[int]) -> None:
    config = SimpleNamespace(
        skip_tokenizer_init=True,
        get_vocab_size=lambda: 10,
        try_get_generation_config=lambda: generation_config,
    )
    view = model_view(SimpleNamespace(model_config=config))
    assert (view.vocab_size, view.eos_token_ids, view.tokenizer) == (10, expected, None)


def test_model_view_with_several_end_tokens(tmp_path: Any) -> None:
    config = SimpleNamespace(
        skip_tokenizer_init=False,
        tokenizer=str(tmp_path),
        tokenizer_revision=None,
        trust_remote_code=False,
        get_vocab_size=lambda: 10,
        try_get_generation_config=lambda: {"eos_token_id": [4, 5]},
    )
    view = model_view(SimpleNamespace(model_config=config))
    assert view.eos_token_ids == {4, 5}
    assert view.tokenizer is None  # the folder holds none, which is logged as a warning
