"""The command `logitship check`. What it needs of torch is imported when it runs: the light client has none."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from typing import Any

from logitship.client.check_report import CheckReport, Severity, page
from logitship.server.config import ServerConfig
from logitship.server.refusals import StartError

from .check_options import CHECKS, CheckOptions, UsageError, read_params

OK, FINDINGS, NOT_CHECKED = 0, 1, 2
"""Exit statuses: nothing to mend; something is; it could not be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes beside the server's flags for the model and the isolation."""
    default = CheckOptions()
    parser.add_argument(
        "target", metavar="TARGET", help="module:Class, path/to/file.py:Class, or a file with one class"
    )
    parser.add_argument(
        "--params",
        action="append",
        default=[],
        metavar="JSON",
        help="custom_params as JSON, or @file; several times: rows get different ones, which finds more",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="for real logits; may be given several times"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=default.max_tokens, metavar="N", help="tokens of a sequence (default: 8)"
    )
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=list(default.batch_sizes),
        metavar="N",
        help="rows of the calls that are timed (default: 1 8 64)",
    )
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="CHECK", help=f"checks that do not count: {', '.join(CHECKS)}"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 also for warnings")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report as JSON")


def run_command(options: dict[str, Any]) -> int:
    """Check what the command line names, and print the report. Returns the exit status.

    Args:
        options: what was parsed: the arguments above, and fields of `ServerConfig`.
    """
    logging.basicConfig(level="ERROR")  # what a server's operator is told of killed sandboxes, the report says too
    known = {field.name for field in dataclasses.fields(ServerConfig)}
    settings = {name: value for name, value in options.items() if name in known}
    try:
        # The author's module may print: that must not get into the report.
        with contextlib.redirect_stdout(sys.stderr):
            report = _check(ServerConfig(**settings), options)
    except (UsageError, StartError, ValueError) as error:
        print(f"logitship check: {error}", file=sys.stderr)
        return NOT_CHECKED
    if options["as_json"]:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(page(report, ascii_only=not _shows_unicode()))
    failed = not report.ok or (options["strict"] and report.count(Severity.WARNING) > 0)
    return FINDINGS if failed else OK


def _check(config: ServerConfig, options: dict[str, Any]) -> CheckReport:
    from .run import run_check
    from .target import load_target

    asked = CheckOptions(
        params=[read_params(text) for text in options["params"]],
        prompts=options["prompt"] or CheckOptions().prompts,
        max_tokens=options["max_tokens"],
        batch_sizes=options["batch_sizes"],
        ignore=frozenset(options["ignore"]),
    )
    target = options["target"]
    return run_check(load_target(target), asked, config, target=target)


def _shows_unicode() -> bool:
    try:
        "✓✗µ…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
