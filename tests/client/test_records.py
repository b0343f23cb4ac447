from __future__ import annotations

import math
import re
from dataclasses import replace

from logitship import (
    FinishReason,
    Generation,
    GenerationChunk,
    Receipt,
    TokenTrace,
    Trace,
    TraceCandidate,
    TraceStage,
    Usage,
)


def test_token_trace_prints_as_table() -> None:
    paris, the = TraceCandidate(5, " Paris"), TraceCandidate(7, " the\n")
    trace = TokenTrace(
        paris,
        (the, paris),
        (
            TraceStage("model", logprobs=(math.log(0.75), math.log(0.25)), num_allowed=49152),
            TraceStage("processor", "ForbidTheArticle", "sha256:0", logprobs=(None, 0.0), num_allowed=1),
        ),
    )
    assert str(trace).splitlines() == [
        "                   model  ForbidTheAr…",
        "  ' the\\n'        75.00%             -",
        "* ' Paris'        25.00%       100.00%",
        "  allowed         49,152             1",
    ]


def test_long_table_includes_sampled_token() -> None:
    candidates = tuple(TraceCandidate(token_id, str(token_id)) for token_id in range(30))
    stage = TraceStage("model", logprobs=(-3.4,) * 30, num_allowed=30)
    lines = str(TokenTrace(candidates[29], candidates, (stage,))).splitlines()
    assert len(lines) == 1 + 12 + 1 + 1
    assert lines[-2].startswith("* '29'")


def html_trace(text: str = " Paris") -> TokenTrace:
    paris, the = TraceCandidate(5, text), TraceCandidate(7, " the\n")
    before = TraceStage("model", logprobs=(math.log(0.75), math.log(0.25)), num_allowed=49152)
    after = TraceStage("processor", "Forbid<b>", "sha256:0", logprobs=(None, 0.0), num_allowed=1)
    return TokenTrace(paris, (the, paris), (before, after, TraceStage("sampling", logprobs=(None, 0.0), num_allowed=1)))


def cells_of(page: str) -> list[list[str]]:
    """Return the cells of an HTML table, with a star on bold rows."""
    rows = re.findall(r"<tr( style=\"font-weight: bold\")?>(.*?)</tr>", page)
    return [[*(["*"] if bold else []), *re.findall(r"<t[hd] [^>]*>(.*?)</t[hd]>", row)] for bold, row in rows]


def test_token_trace_in_a_notebook() -> None:
    assert cells_of(html_trace()._repr_html_()) == [
        ["", "model", "Forbid&lt;b&gt;", "sampling"],
        ["&#x27; the\\n&#x27;", "75.00%", "-", "-"],
        ["*", "&#x27; Paris&#x27;", "25.00%", "100.00%", "100.00%"],
        ["allowed", "49,152", "1", "1"],
    ]


def test_trace_in_a_notebook() -> None:
    trace = Trace([html_trace()])
    assert trace == (html_trace(),)
    assert repr(trace) == repr((html_trace(),))
    assert cells_of(trace._repr_html_()) == [
        ["token", "model", "processors", "allowed", "model&#x27;s first choice"],
        ["*", "1 &#x27; Paris&#x27;", "25.00%", "100.00%", "1", "&#x27; the\\n&#x27; 75.00%"],
    ]


def test_long_trace_in_a_notebook_is_bounded() -> None:
    page = Trace([html_trace()] * 1000)._repr_html_()
    assert len(cells_of(page)) == 1 + 200
    assert "and 800 more" in page


def test_answer_in_a_notebook() -> None:
    hostile = "<script>alert('&')</script>"
    receipt = Receipt(f"sha256:{hostile}", hostile, 3, 1.5, printed=hostile)
    answer = Generation(
        text=f"{hostile}\nnext",
        finish_reason=FinishReason(hostile),
        usage=Usage(completion_tokens=3),
        receipts=(receipt,),
        trace=Trace([html_trace(hostile)]),
        raw={},
    )
    page = answer._repr_html_()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "3 tokens, ended by " in page
    assert "Trace of 1 tokens" in page
    assert "_repr_html_" not in repr(answer)
    assert "Trace of" not in replace(answer, trace=None)._repr_html_()


def test_chunk_in_a_notebook() -> None:
    page = GenerationChunk(text=" <i>", cumulative_text="a <i>", raw={})._repr_html_()
    assert "a &lt;i&gt;</div>" in page
    assert "new: &#x27; &lt;i&gt;&#x27;" in page


def test_long_texts_in_a_notebook_are_cut() -> None:
    printed = Receipt("sha256:0", "Mine", 1, 1.0, printed="x" * 50_000 + "end")
    page = Generation(text="y" * 1_000_000, receipts=(printed,), raw={})._repr_html_()
    assert len(page) < 50_000
    assert "(1,000,000 characters)" in page
    assert "end</pre>" in page
