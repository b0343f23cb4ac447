"""The report as records and as a page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from logitship import CheckReport
from logitship.client.check_report import WIDTH, BatchTiming, CheckResult, Finding, Severity, SlowLine, Verdict, page

LONG = "a row depends on the others and this sentence is continued for rather longer than the page is wide, so"


def report(*checks: CheckResult, ignored: frozenset[str] = frozenset()) -> CheckReport:
    return CheckReport(
        target="mine:Ban",
        name="Ban",
        digest="sha256:" + "0123456789" * 6 + "abcd",
        model="tiny",
        vocab_size=49152,
        isolation="sandbox",
        versions={"python": "3.11"},
        params=[{"token_ids": [3]}, {"token_ids": [4]}],
        num_given_params=1,
        checks=checks,
        timings=[BatchTiming(1, 150.5, 20.25), BatchTiming(64, 40.0, None)],
        slow_lines=[SlowLine("/home/me/mine.py", 12, "logits[row, ids] = -torch.inf", 0.75, 12.5)],
        ignored=ignored,
    )


FAILED = CheckResult(
    "rows",
    Verdict.FAILED,
    "a row depends on the other rows",
    (
        Finding(
            "rows",
            Severity.ERROR,
            f"{LONG}\n  row 0: é ←",
            "Take each row's own.",
            {"got": float("-inf")},
            "Trace\n  at",
        ),
    ),
)
WARNED = CheckResult("speed", Verdict.WARNED, "slow", (Finding("speed", Severity.WARNING, "it loops", "Do not."),))
NOTED = CheckResult("state", Verdict.PASSED, "fine", (Finding("state", Severity.NOTE, "by the way", "Look."),))
SKIPPED = CheckResult("argmax", Verdict.NOT_CHECKED, "no claim")


def test_ok_depends_on_errors_only() -> None:
    assert report(WARNED, NOTED).ok
    assert not report(FAILED).ok
    assert report(FAILED, ignored=frozenset({"rows"})).ok
    full = report(FAILED, WARNED, NOTED, SKIPPED)
    assert [full.count(severity) for severity in Severity] == [1, 1, 1]
    assert [finding.check for finding in full.findings] == ["rows", "speed", "state"]


def test_last_printed_lines_are_shown() -> None:
    printed = "".join(f"line {number}\n" for number in range(50))
    lines = page(replace(report(NOTED), printed=printed)).splitlines()
    start = lines.index("printed for a prompt, the last lines:")
    assert lines[start + 1 : start + 22] == [f"    line {number}" for number in range(30, 50)] + [""]
    assert "printed for" not in page(report(NOTED))


def test_getitem_returns_check_by_name() -> None:
    assert report(FAILED, WARNED)["speed"] is WARNED
    with pytest.raises(KeyError, match="no check is named 'sped'; there are: rows, speed"):
        report(FAILED, WARNED)["sped"]


def test_to_dict_is_json() -> None:
    text = json.dumps(report(FAILED, ignored=frozenset({"speed"})).to_dict(), allow_nan=False)
    plain = json.loads(text)
    assert plain["checks"][0]["verdict"] == "failed"
    assert plain["checks"][0]["findings"][0]["severity"] == "error"
    assert plain["checks"][0]["findings"][0]["details"] == {"got": "-inf"}
    assert (plain["ok"], plain["counts"]) == (False, {"error": 1, "warning": 0, "note": 0})
    assert plain["ignored"] == ["speed"]
    assert plain["timings"][1] == {"rows": 64, "total": 40.0, "own": None}


def test_to_dict_of_params_that_are_no_json() -> None:
    params = {"a": [complex(1, 2), None, True], "b": json.loads, "c": {1, "d"}, "e": json}
    plain = json.loads(json.dumps(replace(report(FAILED), params=(params,)).to_dict()))
    assert plain["params"] == [
        {"a": ["(1+2j)", None, True], "b": repr(json.loads), "c": [1, "d"], "e": repr(json)},
    ]


def test_page_layout() -> None:
    text = str(report(FAILED, NOTED, SKIPPED, WARNED))
    assert text == repr(report(FAILED, NOTED, SKIPPED, WARNED))
    assert text.splitlines() == [
        "Ban  sha256:0123456789012345678…",
        "on tiny, 49,152 tokens, in a sandbox",
        'params {"token_ids": [3]}',
        '   and {"token_ids": [4]}, derived from it to tell rows apart',
        "",
        "✗ rows    a row depends on the other rows",
        "    error: a row depends on the others and this sentence is continued for rather longer than the",
        "      page is wide, so",
        "        row 0: é ←",
        "      Trace",
        "        at",
        "    fix: Take each row's own.",
        "✓ state   fine",
        "    note: by the way",
        "    hint: Look.",
        "- argmax  no claim",
        "! speed   slow",
        "      rows      µs/row     your code     ms/step",
        "         1       150.5          20.2        0.15",
        "        64        40.0             -        2.56",
        "    slowest lines:",
        "      mine.py:12  75%     12.5 µs  logits[row, ids] = -torch.inf",
        "    warning: it loops",
        "    fix: Do not.",
        "",
        "1 error, 1 warning",
    ]
    assert max(map(len, text.splitlines())) <= WIDTH


def test_ascii_page() -> None:
    text = page(report(FAILED, WARNED, NOTED, SKIPPED), ascii_only=True)
    assert text.isascii()
    assert r"  row 0: \xe9 <-" in text
    signs = {line.split()[1]: line[0] for line in text.splitlines() if line[:1] in "x!+-" and line[1:2] == " "}
    assert signs == {"rows": "x", "speed": "!", "state": "+", "argmax": "-"}


def test_no_findings() -> None:
    assert str(report(NOTED)).endswith("\n\nNo errors, no warnings.")
