from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from logitship.builtin_processors.params import ProcessorParams
from logitship.builtin_processors.parts.text_tokens import (
    PhraseTokens,
    TokenOfText,
    TokenOfTextOrEos,
    eos_token_id,
    sentence_ends,
)
from logitship.sampler.processors.request_view import ModelView
from tests.helpers.zoo import RECORDING

# Recorded texts that are no token here, to the reason.
REFUSED = {
    "10": "QUIRK: the original takes the second of two tokens",
    "1.": "QUIRK: the same",
    "zzz": "QUIRK: the original takes the token that stands for all unknown texts",
}


class Params(ProcessorParams):
    token: TokenOfText = 0
    or_end: TokenOfTextOrEos = Field(default=None, validate_default=True)
    phrase: PhraseTokens = ()


def token_of(text: Any, model: ModelView) -> int:
    return Params.read({"token": text}, model).token


def fake_tokenizer(encoded: list[int], **attributes: Any) -> Any:
    """Encodes every text to the same tokens. Token 8 is a space."""
    return SimpleNamespace(
        encode=lambda text, add_special_tokens: encoded,
        decode=lambda token_ids: "".join(" " if token_id == 8 else "x" for token_id in token_ids),
        unk_token=None,
        unk_token_id=None,
        eos_token_id=2,
        **attributes,
    )


def recorded(recording: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in recording["utils"] if case["function"] == "text_to_token"]


def test_recording(zoo_models: dict[bool | None, ModelView]) -> None:
    tokens, refused = 0, set()
    for case in recorded(RECORDING):
        if "fake_tokenizer" in case:
            attributes = dict(case["fake_tokenizer"])
            model = ModelView(48, frozenset({2}), fake_tokenizer(attributes.pop("encode"), **attributes))
        else:
            model = zoo_models[False if case["tokenizer_variant"].startswith("strict") else None]
        text = case.get("text", "any")
        if case["last"]:
            assert case["expect"]["token"] in sentence_ends(model)
            tokens += 1
        elif "raises" in case["expect"] or text in REFUSED:
            with pytest.raises(ValueError, match=r"^token: expected a string of one token, "):
                token_of(text, model)
            refused.add(text)
        else:
            assert token_of(text, model) == case["expect"]["token"], case["name"]
            tokens += 1
    assert tokens == 9
    assert set(REFUSED) < refused


def test_prefix_token_is_ignored() -> None:
    for add_prefix_space in (None, True):
        fake = fake_tokenizer([7, 9], bos_token=None, bos_token_id=None, add_prefix_space=add_prefix_space)
        with pytest.raises(ValueError, match="'ab' is 2 tokens"):
            token_of("ab", ModelView(48, frozenset({2}), fake))


def test_unknown_token_by_its_text(zoo_model: ModelView) -> None:
    assert token_of("<unk>", zoo_model) == 3
    with pytest.raises(ValueError, match="'zzz' is unknown to this model"):
        token_of("zzz", zoo_model)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"token": 5}, "token: expected a string of one token, got 5"),
        ({"token": None}, "token: expected a string of one token, got None"),
        ({"token": ""}, "token: expected a string of one token, but '' is 0 tokens of this model"),
        ({"or_end": "a b"}, "or_end: expected a string of one token, but 'a b' is 3 tokens of this model"),
        ({"or_end": False}, "or_end: expected a string of one token, got False"),
        ({"phrase": ["a"]}, r"phrase: expected a string, got \['a'\]"),
        ({"phrase": ""}, "phrase: expected a string of at least one token, got ''"),
    ],
)
def test_refuses(params: dict[str, Any], message: str, zoo_model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Params.read(params, zoo_model)


def test_token_outside_the_vocabulary(zoo_model: ModelView) -> None:
    small = ModelView(29, zoo_model.eos_token_ids, zoo_model.tokenizer)
    with pytest.raises(ValueError, match=r"^phrase: 'a </think>' needs token 29, which the model cannot sample$"):
        Params.read({"phrase": "a </think>"}, small)


def test_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"^token: the model has no tokenizer"):
        token_of("a", ModelView(48, frozenset({2}), None))


def test_eos_token(zoo_model: ModelView) -> None:
    assert Params.read({}, zoo_model).or_end == 2
    assert eos_token_id(ModelView(48, frozenset({1, 2, 5}), zoo_model.tokenizer)) == 2
    assert eos_token_id(ModelView(48, frozenset({7, 5}), zoo_model.tokenizer)) == 5
    with pytest.raises(ValueError, match=r"^or_end: the model has no EOS token$"):
        Params.read({}, ModelView(48, frozenset(), zoo_model.tokenizer))


def test_sentence_ends(zoo_model: ModelView) -> None:
    tokenizer = RECORDING["tokenizer"]
    assert sentence_ends(zoo_model) == {tokenizer["full_stop_token"], tokenizer["new_line_token"]}
