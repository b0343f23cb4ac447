"""The command `logitship check`. Modules that need torch are imported when it runs: a client may not have torch."""

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
"""Exit statuses: no findings that count; findings; the class could not be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, except for the server's flags for the model and the isolation."""
    default = CheckOptions()
    parser.add_argument(
        "target", metavar="TARGET", help="module:Class, path/to/file.py:Class, or a file with one class"
    )
    parser.add_argument(
        "--params",
        action="append",
        default=[],
        metavar="JSON",
        help="custom_params as JSON, or @file; may be repeated: rows with different parameters find more mistakes",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="prompt of the sequences; may be repeated"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=default.max_tokens, metavar="N", help="tokens per sequence (default: 8)"
    )
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=list(default.batch_sizes),
        metavar="N",
        help="batch sizes of the timed calls (default: 1 8 64)",
    )
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="CHECK", help=f"checks to ignore, of: {', '.join(CHECKS)}"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report as JSON")


def run_command(options: dict[str, Any]) -> int:
    """Check a class, print the report, and return the exit status.

    Args:
        options: the parsed arguments: those of `add_arguments`, and fields of `ServerConfig`.
    """
    logging.basicConfig(level="ERROR")  # the report repeats the warnings about killed sandboxes
    known = {field.name for field in dataclasses.fields(ServerConfig)}
    settings = {name: value for name, value in options.items() if name in known}
    try:
        # The author's module may print; its output must not mix with the report.
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
    from .class_import import import_class
    from .run import run_check

    check_options = CheckOptions(
        params=[read_params(text) for text in options["params"]],
        prompts=options["prompt"] or CheckOptions().prompts,
        max_tokens=options["max_tokens"],
        batch_sizes=options["batch_sizes"],
        ignore=frozenset(options["ignore"]),
    )
    target = options["target"]
    return run_check(import_class(target), check_options, config, target=target)


def _shows_unicode() -> bool:
    try:
        "✓✗µ…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
