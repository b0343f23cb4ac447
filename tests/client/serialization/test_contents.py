"""The largest contents of a string that is too long."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from logitship import CustomLogitProcessor
from logitship.client.serialization.contents import largest_contents, too_large_message

WORDS = {f"word {number}": number for number in range(3000)}
TENSOR = torch.zeros(30_000)
ARRAY = np.zeros((100, 100), np.float64)


class PreTrainedTokenizerBase:
    """As large as a tokenizer."""

    def __init__(self) -> None:
        self.vocabulary = [f"token {number}" for number in range(20_000)]


TOK = PreTrainedTokenizerBase()


def encode(text: str) -> int:
    return WORDS[text] + len(TOK.vocabulary)


class Large(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + TENSOR[0] + ARRAY[0, 0] + encode("word 1")


def test_largest_contents_are_named_with_their_use() -> None:
    contents = largest_contents(Large)
    assert [(each.label, each.kind) for each in contents] == [
        ("global 'TOK' used by encode", "a tokenizer"),
        ("global 'TENSOR' used by Large.__call__", "a tensor, float32 [30000]"),
        ("global 'ARRAY' used by Large.__call__", "an array, float64 [100, 100]"),
    ]
    assert 240_000 <= contents[1].size <= 241_000
    assert 160_000 <= contents[2].size <= 161_000


def test_message_names_the_flag_and_what_to_do() -> None:
    message = too_large_message(Large, 1_234_567, 1 << 20)
    assert message.startswith(
        "the processor string of class Large has 1,234,567 bytes, and the server takes at most 1,048,576 "
        "(--max-processor-size). Its largest contents: global 'TOK' used by encode, a tokenizer ("
    )
    assert (
        "bytes): use `__req__.tokenizer`; global 'TENSOR' used by Large.__call__, a tensor, float32 [30000]" in message
    )
    assert message.endswith("a tokenizer is in __req__.tokenizer already")


def test_small_class_has_one_content() -> None:
    class Small(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits

    assert len(largest_contents(Small)) >= 1
