from __future__ import annotations

from logitship.client.records import Receipt
from logitship.server.offline.outputs import CompletionOutput, RequestOutput


def test_outputs_in_a_notebook() -> None:
    receipt = Receipt("sha256:0", "Mine", 2, 1.0)
    answers = [
        CompletionOutput(index, text, [1, 2], None, None, "length", receipts=(receipt,))
        for index, text in enumerate(["<b>one", "two"])
    ]
    page = RequestOutput("0", "hi", [5], None, answers, finished=True)._repr_html_()
    first, second = page.split("<hr>")
    assert "&lt;b&gt;one</div>" in first
    assert "2 tokens, ended by length" in first
    assert "Mine: 2 steps" in second
