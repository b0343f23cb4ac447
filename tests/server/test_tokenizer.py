from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedTokenizerFast

from logitship.server.tokenizer import Tokenizer

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
