"""`logitship demo` on the default model."""

from __future__ import annotations

import re

import pytest

from logitship.client.records import Generation
from logitship.server import demo
from logitship.server.config import ServerConfig


def words_with_s(text: str) -> float:
    """Return the share of words that start with s."""
    words = re.findall(r"[A-Za-z]+", text)
    return sum(word[0] in "sS" for word in words) / len(words)


def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[list[Generation]] = []
    ask_all = demo.ask_all

    async def recorded(base_url: str) -> list[list[Generation]]:
        answers.extend(await ask_all(base_url))
        return answers

    monkeypatch.setattr(demo, "ask_all", recorded)
    monkeypatch.setenv("COLUMNS", "100")
    assert demo.run_demo(ServerConfig()) == 0

    for alone, lipogram, alliteration in answers:
        assert "e" in alone.text
        assert "e" not in lipogram.text.lower()
        assert words_with_s(alliteration.text) > 2 * words_with_s(alone.text)
        assert alone.receipts == ()
        for generation, name in ((lipogram, "Lipogram"), (alliteration, "Alliteration")):
            (receipt,) = generation.receipts
            assert receipt.name == name
            assert receipt.steps >= generation.usage.completion_tokens

    printed = capsys.readouterr().out
    assert max(map(len, printed.split("4. The receipts")[0].splitlines())) <= 100
    for word in (*demo.PROMPTS, "Lipogram", "Alliteration", "sha256:", "Next steps"):
        assert word in printed
