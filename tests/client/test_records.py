from __future__ import annotations

import math

from logitship import TokenTrace, TraceCandidate, TraceStage


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
