from __future__ import annotations

import difflib
from collections.abc import Sequence

import pytest

from logitship.server.processors.processor_names import Versions, is_name, missing_message, split_reference

INSTALLED = ["disallowed_tokens", "grammar"]
REGISTERED = {"Lipogram": Versions((2, 4), 4), "Gone": Versions((), 3)}


@pytest.mark.parametrize("name", ["L", "_", "Lipogram", "no.digits-2_x", "x" * 64])
def test_valid_names(name: str) -> None:
    assert is_name(name)
    assert split_reference(name) == (name, None)
    assert split_reference(f"{name}@12") == (name, 12)


@pytest.mark.parametrize(
    "name", ["", "2x", "-x", ".x", "a b", "a/b", "a@1", "a\n", "Größe", "x" * 65, "module:Class", "sha256:00"]
)
def test_invalid_names(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("reference", ["", "a@", "a@0", "a@01", "a@-1", "a@x", "a@1@2", "a@1\n", "@1", "a@" + "9" * 10])
def test_invalid_references(reference: str) -> None:
    assert split_reference(reference) is None


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("lipogram", "as 'lipogram', did you mean Lipogram? Installed are: disallowed_tokens, grammar; "),
        ("grammer@1", "as 'grammer@1', did you mean grammar? Installed are: disallowed_tokens, grammar; "),
        ("qqq", "as 'qqq'; installed are: disallowed_tokens, grammar; registered are: Lipogram"),
        ("q" * 500, f"as '{'q' * 80}'; "),
        ("Lipogram@5", "Lipogram@5 was never registered: the last version of Lipogram is 4"),
        ("Lipogram@3", "it was deleted, or evicted to make space for others. Registered are: Lipogram@2, Lipogram@4"),
        ("Lipogram@x", "'Lipogram@x' names no version: write a number after the @. Registered are: Lipogram@2, "),
        ("Gone@x", "names no version: write a number after the @. Registered are: none"),
        ("Gone", "Gone is not registered any more: it was deleted, or evicted to make space for others. Register it"),
        ("Gone@3", "Gone@3 is not registered any more: "),
    ],
)
def test_missing_message(reference: str, expected: str) -> None:
    text = missing_message(reference, INSTALLED, REGISTERED)
    assert expected in text
    assert len(text) < 1000


def test_long_list_is_cut() -> None:
    registered = {f"Name{number}": Versions((1,), 1) for number in range(30)}
    assert "; registered are: Name0, " in missing_message("qqq", [], registered)
    assert missing_message("qqq", [], registered).endswith(" and 10 more")
    many = {"Lipogram": Versions(tuple(range(1, 500)), 600)}
    assert len(missing_message("Lipogram@550", [], many)) < 1000


def test_missing_message_without_processors() -> None:
    assert missing_message("x", [], {}) == "no processor is installed or registered as 'x'; installed are: none"


def test_few_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Sequence[str]] = []

    def get_close_matches(word: str, possibilities: Sequence[str], n: int) -> list[str]:
        compared.append(possibilities)
        return close_matches(word, possibilities, n)

    close_matches = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", get_close_matches)
    registered = {f"{'x' * (number % 60)}_{number}": Versions((1,), 1) for number in range(600)}
    text = missing_message("Lipogran", INSTALLED, {**registered, "Lipogram": Versions((1,), 1)})
    assert "did you mean Lipogram?" in text
    assert [len(names) for names in compared] == [len(INSTALLED) + 20]
