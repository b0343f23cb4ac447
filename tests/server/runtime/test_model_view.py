from __future__ import annotations

import logging

import pytest
import transformers

from logitship.server.runtime.model_view import load_tokenizer

TRANSFORMERS = logging.getLogger("transformers")


@pytest.mark.parametrize("fails", [False, True])
def test_log_level_is_restored(fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    levels = []

    def load(name: str, **_: object) -> str:
        levels.append(TRANSFORMERS.level)
        if fails:
            raise ValueError("unknown architecture")
        return name

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        found = load_tokenizer("tiny", None, False, logging.getLogger("plugin"))
        assert TRANSFORMERS.level == logging.WARNING
    assert levels == [logging.ERROR]
    assert found == (None if fails else "tiny")
    assert ("processors get no tokenizer" in caplog.text) == fails
