from __future__ import annotations

import sys

import pytest

from logitship.server.dev.debugger import debugger_for


@pytest.mark.parametrize(("debugger", "is_ours"), [("", True), ("pdb.set_trace", False), ("0", False)])
def test_chosen_debugger_is_kept(debugger: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", debugger)
    before = sys.breakpointhook
    with debugger_for(list):
        assert (sys.breakpointhook is not before) == is_ours
    assert sys.breakpointhook is before
