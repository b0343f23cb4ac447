from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitship.server.http.openai.openai_logprobs import TextOffsets, completion_logprobs
from logitship.server.requests.messages import TokenLogprobs
from logitship.server.tokenizer import Tokenizer

TEXT = "Yes \U0001f628 and \U0001f628é, then café \N{ZERO WIDTH JOINER}日本"


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Tokenizer:
    """One token for each byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = TokenizersTokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def offsets_of(tokenizer: Tokenizer, prompt: list[int], text: str | None, **options: Any) -> TextOffsets:
    values = {"skip_special_tokens": True, "spaces_between_special_tokens": True} | options
    return TextOffsets(tokenizer, prompt, text, **values)


def test_offsets_of_tokens_that_are_parts_of_characters(bytes_tokenizer: Tokenizer) -> None:
    """Each byte is at the offset of its character, in the prompt and in the output, wherever one ends."""
    expected = [index for index, character in enumerate(TEXT) for _ in character.encode()]
    tokens = bytes_tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(tokens) == len(expected)
    assert offsets_of(bytes_tokenizer, tokens, TEXT).of_prompt() == expected
    output = offsets_of(bytes_tokenizer, [], None)
    assert [output.push(token) for token in tokens] == expected
    cut = len("Yes \U0001f628".encode())
    after = offsets_of(bytes_tokenizer, tokens[:cut], bytes_tokenizer.decode(tokens[:cut]))
    assert [*after.of_prompt(), *map(after.push, tokens[cut:])] == expected


def test_offsets_beside_special_tokens(bytes_tokenizer: Tokenizer) -> None:
    begin, end = bytes_tokenizer.hf_tokenizer.bos_token_id, bytes_tokenizer.hf_tokenizer.eos_token_id
    a, b = bytes_tokenizer.encode("ab", add_special_tokens=False)
    assert offsets_of(bytes_tokenizer, [begin, a, b], "ab").of_prompt() == [0, 0, 1]  # which the tokenizer added
    assert offsets_of(bytes_tokenizer, [a, end, b], "a</s>b").of_prompt() == [0, 1, 5]
    hidden = offsets_of(bytes_tokenizer, [], None)
    assert [hidden.push(token) for token in (a, end, b, a)] == [0, 1, 1, 2]
    shown = offsets_of(bytes_tokenizer, [], None, skip_special_tokens=False)
    assert [shown.push(token) for token in (a, end, b, a)] == [0, 1, 5, 6]


def test_each_token_has_a_key_of_its_own(bytes_tokenizer: Tokenizer) -> None:
    """`top_logprobs[i][tokens[i]]` is what a client looks up, lm-eval for one."""
    rng = random.Random(0)
    partial = bytes_tokenizer.encode("\U0001f628é日", add_special_tokens=False)
    for _ in range(200):
        token, *likely = rng.sample(range(len(bytes_tokenizer.hf_tokenizer)), 6)
        likely = [*rng.sample(partial[:4], 2), *likely, *([token] if rng.random() < 0.5 else [])]
        top = tuple((each, -float(index)) for index, each in enumerate(dict.fromkeys(likely)))
        own = dict(top).get(token, -20.0)
        built = completion_logprobs(bytes_tokenizer, [TokenLogprobs(token, own, 1, top)], 10, [0])
        (by_key,) = built["top_logprobs"]
        assert by_key is not None
        assert by_key[built["tokens"][0]] == own
        assert sorted(by_key.values(), reverse=True) == sorted({own, *dict(top).values()}, reverse=True)


def test_tokens_with_the_same_text(bytes_tokenizer: Tokenizer) -> None:
    """Ids beyond the tokenizer's have no text at all."""
    top = ((1000, -1.0), (1001, -2.0), (1002, -3.0))
    position = TokenLogprobs(1001, -2.0, 2, top)
    built = completion_logprobs(bytes_tokenizer, [position], 3, [0])
    assert built["tokens"] == [""]
    assert built["top_logprobs"] == [{"token_id:1000": -1.0, "": -2.0, "token_id:1002": -3.0}]
