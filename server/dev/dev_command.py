"""The command `logitship dev`. Modules that need torch are imported when it runs: a client may not have torch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from logitship.server.check.check_options import UsageError, read_params
from logitship.server.config import DEFAULT_MODEL, ServerConfig
from logitship.server.refusals import StartError

OK, FAILED, NOT_STARTED = 0, 1, 2
"""Exit statuses: success; `--once` without an answer; an argument is wrong, or the model cannot be loaded."""
_INTERRUPTED = 130
"""Exit status after Ctrl-C, with `--once` or while the author's code runs."""

DEFAULT_PROMPT = "Name the seasons."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, except for the server's flags for the model."""
    parser.add_argument(
        "target", metavar="FILE", help="path/to/file.py; path/to/file.py:Class if it has several processor classes"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"a user's message; may be repeated: they run as rows of one batch (default: {DEFAULT_PROMPT!r})",
    )
    parser.add_argument(
        "--params", default="{}", metavar="JSON", help="custom_params as JSON, or @file, which is watched too"
    )
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens of an answer (default: 32)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for sampling (default: 0)")
    parser.add_argument(
        "--completion", action="store_true", help="continue the prompt itself, without the model's chat template"
    )
    parser.add_argument(
        "--trace",
        choices=["lines", "tables", "off"],
        default="lines",
        help="a line for each token, a table with the candidates of each token, or nothing (default: lines)",
    )
    parser.add_argument("--once", action="store_true", help="run once, and exit with 1 if there is no answer")


def run_command(options: dict[str, Any]) -> int:
    """Run a class on every save until Ctrl-C, and return the exit status.

    Args:
        options: the parsed arguments: those of `add_arguments`, and fields of `ServerConfig`.
    """
    from pathlib import Path

    logging.basicConfig(level="ERROR")
    name = options["target"].rpartition(":")[0] or options["target"]
    try:
        if not name.endswith(".py"):
            raise UsageError(f"{options['target']}: must be a Python file, file.py or file.py:Class")
        if not Path(name).is_file():
            raise UsageError(f"there is no file {name!r}")
        read_params(options["params"])
        return _run(options)
    except (UsageError, StartError, ValueError) as error:
        print(f"logitship dev: {error}", file=sys.stderr)
        return NOT_STARTED


def _run(options: dict[str, Any]) -> int:
    from logitship.server.offline.llm import LLM

    from .author_file import AuthorFile
    from .debugger import debugger_for
    from .leaving import TerminalSettings, authors_position, ends_in_time
    from .session import DevOptions, DevSession
    from .watching import wait_for_change

    dev_options = DevOptions(
        prompts=options["prompt"] or [DEFAULT_PROMPT],
        params=options["params"],
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        seed=options["seed"],
        is_chat=not options["completion"],
        trace=options["trace"],
    )
    settings = {name: options[name] for name in ServerConfig.__dataclass_fields__ if name in options}
    model = settings.pop("model_path", DEFAULT_MODEL)
    _write(f"loading {model} …")
    _write(
        f"processor_isolation is none: {options['target']} runs in this process, with breakpoint() and without limits; "
        f"on a server it runs in a sandbox, as in `logitship check {options['target']}`"
    )
    # A second save within a second may leave a compiled file that looks up to date.
    sys.dont_write_bytecode = True
    terminal = TerminalSettings()
    llm = LLM(model, max_num_seqs=max(1, len(dev_options.prompts)), **settings)
    file = AuthorFile(options["target"], dev_options.data_files)
    session = DevSession(llm, file, dev_options, _write)
    status = OK
    try:
        with debugger_for(lambda: file.paths):
            if options["once"]:
                status = OK if session.run() else FAILED
            else:
                session.run_on_every_save(wait_for_change)
    except KeyboardInterrupt:
        status = _INTERRUPTED if options["once"] else OK
        where = authors_position(file.paths)
        _write("" if where is None else f"\ninterrupted at {where}")
    finally:
        if not ends_in_time(llm.shutdown):
            terminal.restore()
            sys.stdout.flush()
            os._exit(_INTERRUPTED)
    return status


def _write(text: str) -> None:
    print(text, flush=True)
