from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedTokenizerFast

from logitship.server.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.helpers.random_cases import random_seeds

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("text", ["plain", "é € 😀", " two  spaces ", "\n\t\0", ""])
def test_round_trip(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()


def test_every_byte_has_its_token(tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_bytes(token) for token in range(4, 260)} == {bytes([byte]) for byte in range(256)}


def test_longest_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token == len("</think>")


def test_special_tokens(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    assert tokenizer.decode([0, a, 2, 1]) == "<s>a<think></s>"
    assert tokenizer.decode([0, a, 2, 1], skip_special_tokens=True) == "a"
    assert [tokenizer.is_special(token) for token in (0, 1, 2, 3, a)] == [True] * 4 + [False]
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.token_text(2) == "<think>"


def test_partial_character(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("€", add_special_tokens=False)[0]
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_bytes(first) == b"\xe2"


def test_overridden_decode_is_used(tokenizer: Tokenizer) -> None:
    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    shouting = Tokenizer(Shouting(tokenizer_object=tokenizer.hf_tokenizer.backend_tokenizer, eos_token="</s>"))
    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert (tokenizer.decode(ids), shouting.decode(ids)) == ("abc", "ABC")


def test_token_beyond_the_tokenizers_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(99_999) == ""
    assert tokenizer.token_bytes(99_999) == b""


def test_added_token_outside_of_the_byte_alphabet(tokenizer: Tokenizer) -> None:
    backend = TokenizersTokenizer.from_str(tokenizer.hf_tokenizer.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("日 本", normalized=False)])
    added = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    (token,) = added.encode("日 本", add_special_tokens=False)
    assert token == 260
    assert added.token_bytes(token) == "日 本".encode()


def test_byte_fallback() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "▁a": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "<0xZZ>": 6}
    backend = TokenizersTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert [tokenizer.token_bytes(token) for token in (3, 4, 5)] == [b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.decode([3, 4, 5]) == "€"
    assert tokenizer.token_bytes(6) == b"<0xZZ>"


def test_chat_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.decode(ids) == "user: Hi\nassistant: "
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(ids) == "user: Hi\n"


def test_rendered_conversation_is_bounded(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.apply_chat_template(MESSAGES, max_characters=20)) == 20
    with pytest.raises(ValueError, match="makes 20 characters of them, more than 19"):
        tokenizer.apply_chat_template(MESSAGES, max_characters=19)


def test_missing_chat_template(tokenizer: Tokenizer) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.hf_tokenizer.backend_tokenizer, eos_token="</s>")
    with pytest.raises(ValueError, match="no chat template: start the server with --chat-template FILE"):
        Tokenizer(bare).apply_chat_template(MESSAGES)


def test_chat_template_error(tokenizer: Tokenizer) -> None:
    strict = PreTrainedTokenizerFast(tokenizer_object=tokenizer.hf_tokenizer.backend_tokenizer, eos_token="</s>")
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="the chat template refuses the messages: roles must alternate"):
        Tokenizer(strict).apply_chat_template(MESSAGES)


REPLACEMENT = "\ufffd"
END, THINK = 1, 2
"""Special tokens of the tiny tokenizer."""


def detokenizer(tokenizer: Tokenizer, context: list[int], skip: bool = True) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, context, skip_special_tokens=skip, spaces_between_special_tokens=True)


def pieces_of(text: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(text.push(token) for token in ids), text.flush()]


def test_character_is_emitted_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€😀b", add_special_tokens=False)
    assert len(ids) == 1 + 3 + 4 + 1
    assert pieces_of(detokenizer(tokenizer, []), ids) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_prompt_ends_inside_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀y", add_special_tokens=False)
    for cut in (2, 3, 4):
        assert "".join(pieces_of(detokenizer(tokenizer, ids[:cut]), ids[cut:])) == "😀y"


def test_invalid_bytes_of_prompt_are_not_repeated(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("€", add_special_tokens=False)[1]
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    assert pieces_of(detokenizer(tokenizer, [continuation] * 5), [a, b]) == ["a", "b", ""]


def test_incomplete_prompt_without_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert detokenizer(tokenizer, ids[:2]).flush() == ""


def test_incomplete_characters_become_replacement_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab€", add_special_tokens=False)
    assert pieces_of(detokenizer(tokenizer, []), ids[:-1]) == ["a", "b", "", "", REPLACEMENT]
    broken = [ids[3], ids[0], ids[1]]
    assert "".join(pieces_of(detokenizer(tokenizer, []), broken)) == f"{REPLACEMENT}ab"


def test_invalid_bytes_hold_back_at_most_three_tokens(tokenizer: Tokenizer) -> None:
    """However many invalid bytes there are."""
    lead = tokenizer.encode("€", add_special_tokens=False)[0]
    text = detokenizer(tokenizer, [])
    emitted = ""
    for number in range(1, 50):
        emitted += text.push(lead)
        assert len(emitted) >= number - 3
    assert emitted + text.flush() == REPLACEMENT * 49


def test_flush_does_not_repeat_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€a", add_special_tokens=False)
    text = detokenizer(tokenizer, [])
    assert [text.push(ids[0]), text.flush(), text.flush(), text.push(ids[3])] == ["", REPLACEMENT, "", "a"]


def test_skip_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    ids.insert(1, THINK)
    assert pieces_of(detokenizer(tokenizer, [], skip=True), ids) == ["a", "", "b", ""]
    assert pieces_of(detokenizer(tokenizer, [], skip=False), ids) == ["a", "<think>", "b", ""]


def test_special_tokens_inside_character(tokenizer: Tokenizer) -> None:
    first, second, third = tokenizer.encode("€", add_special_tokens=False)
    ids = [first, THINK, THINK, THINK, END, second, third]
    assert pieces_of(detokenizer(tokenizer, []), ids) == ["", "", "", "", "", "", "€", ""]


BEGINNINGS = {
    chr(number).encode()[:length]
    for number in range(0x80, sys.maxunicode + 1)
    if not 0xD800 <= number < 0xE000
    for length in range(1, len(chr(number).encode()))
}
"""Bytes that are incomplete characters."""


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """Return a mix of several scripts, invalid bytes, incomplete characters and special tokens."""
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.6:
            text = "".join(rng.choices("ab é€ß日本語😀👩‍🚀\ufffd", k=rng.randint(1, 4)))
            ids += tokenizer.encode(text, add_special_tokens=False)[: rng.choice([1, 2, 100])]
        elif kind < 0.9:
            ids += [rng.randrange(4, 260) for _ in range(rng.randint(1, 3))]
        else:
            ids.append(rng.randrange(4))
    return ids


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([0xEF, 0xBF, 0xBD, 0xE2], "€x"),
        ([0xFF, 0xFF, 0xFF, 0xE2], "€x"),
        ([0xF0, 0x9F, 0xE6, 0xE2], "€x"),
        ([0xEF, 0xBF, 0xBD, 0xE2, 0x82], "€x"),
        ([0xEF, 0xBF, 0xBD, 0xFF], "x"),
    ],
)
def test_character_that_the_prompt_begins_after_a_replacement_character(
    context: list[int], expected: str, tokenizer: Tokenizer
) -> None:
    token_of = {tokenizer.token_bytes(token): token for token in range(4, 260)}
    rest = b"x" if context[-1] == 0xFF else b"\xe2\x82\xacx".removeprefix(bytes(context[3:]))
    prompt, output = ([token_of[bytes([byte])] for byte in data] for data in (context, rest))
    assert "".join(pieces_of(detokenizer(tokenizer, prompt), output)) == expected


@pytest.mark.parametrize("skip", [True, False])
@random_seeds(60)
def test_pieces_concatenate_to_the_decoded_text(seed: int, skip: bool, tokenizer: Tokenizer) -> None:
    rng = random.Random(seed)
    context, ids = random_ids(rng, tokenizer, rng.randint(0, 5))[:5], random_ids(rng, tokenizer, 40)
    text = detokenizer(tokenizer, context, skip)

    def decoded(count: int) -> str:
        return tokenizer.decode(context + ids[:count], skip_special_tokens=skip)

    # An incomplete character at the end of the prompt is part of the output.
    known = decoded(0)
    for pending in range(1, min(3, len(context)) + 1):
        if known.endswith(REPLACEMENT):
            shorter = tokenizer.decode(context[: len(context) - pending], skip_special_tokens=skip)
            if not shorter.endswith(REPLACEMENT):
                known = shorter
    # After other U+FFFDs, it is one if it could still become a character.
    for pending in range(1, min(3, len(context)) + 1):
        tail = [token for token in context[-pending:] if not (skip and tokenizer.is_special(token))]
        if known == decoded(0) and b"".join(map(tokenizer.token_bytes, tail)) in BEGINNINGS:
            known = tokenizer.decode(context[: len(context) - pending], skip_special_tokens=skip)
            break
    whole = decoded(len(ids))
    emitted = known
    for count, token in enumerate(ids, 1):
        emitted += text.push(token)
        # Later tokens do not change emitted text, so no piece ended inside a character.
        assert whole.startswith(emitted)
        assert len(decoded(count)) - len(emitted) <= 3
    assert emitted + text.flush() == whole


def test_leading_space_is_kept(sentencepiece_like: Tokenizer) -> None:
    """Decoding a word alone strips its space: a piece is the difference to the previous token."""
    text = detokenizer(sentencepiece_like, [3])
    assert pieces_of(text, [4, 3, 4]) == [" world", " hello", " world", ""]
    assert pieces_of(detokenizer(sentencepiece_like, []), [3, 4]) == ["hello", " world", ""]


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁hello": 3, "▁world": 4}
    tokenizer = TokenizersTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"))
