"""Fixtures of `logitship dev` on the tiny model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logitship.server.dev.author_file import AuthorFile
from logitship.server.dev.session import DevOptions, DevSession
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.offline.llm import LLM


@pytest.fixture
def llm(make_engine: Callable[..., AsyncEngine]) -> Iterator[LLM]:
    made = LLM._from_engine(make_engine(logits_processor_pattern=".*"))
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The author's folder, which is the current one. What a test imports is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


class Terminal:
    """A session and what it has written."""

    def __init__(self, session: DevSession, lines: list[str]) -> None:
        self.session = session
        self._lines = lines

    def run(self) -> tuple[bool, str]:
        """Run once; return the result, and what was written without the title."""
        self._lines.clear()
        result = self.session.run()
        return result, "\n".join(self._lines[1:])

    @property
    def text(self) -> str:
        return "\n".join(self._lines)


@pytest.fixture
def make_terminal(llm: LLM) -> Callable[..., Terminal]:
    def make(target: str = "mine.py", **options: object) -> Terminal:
        given = {"prompts": ["hi"], "max_tokens": 3, "is_chat": False, "trace": "off", **options}
        dev_options = DevOptions(**given)  # type: ignore[arg-type]
        lines: list[str] = []
        return Terminal(DevSession(llm, AuthorFile(target, dev_options.data_files), dev_options, lines.append), lines)

    return make
