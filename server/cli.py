"""The command line: `logitship serve`, `check`, `dev`, `demo`, `detect-watermark` and `doctor`."""

from __future__ import annotations

import argparse
import difflib
import gc
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, Literal, NoReturn, get_args, get_origin

from logitship.server.check.command import add_arguments as add_check_arguments
from logitship.server.check.command import run_command as run_check_command
from logitship.server.dev.dev_command import add_arguments as add_dev_arguments
from logitship.server.dev.dev_command import run_command as run_dev_command

from .config import ServerConfig, setting_types
from .detect_watermark import add_arguments as add_detect_arguments
from .detect_watermark import run_command as run_detect_command
from .doctor.doctor_command import DIAGNOSES, run_doctor_command
from .flags import FLAG_OF_FIELD, FLAGS, Flag
from .refusals import StartError

_SWITCH_INTERVAL = 0.00005
"""Seconds after which a thread must let another run Python code (Python's default is a hundred times as long). Each of
the hundreds of operations of a forward pass releases the GIL, and waits that long for it while requests are parsed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = _parser()
    known, unknown = parser.parse_known_args(arguments)
    options = vars(known)
    command = options.pop("command")
    if unknown:
        _command_parser(parser, command).error(_unknown_argument(parser, command, unknown))
    if command == "doctor" and options["engine"] is not None:
        if options["url"] is None:
            _command_parser(parser, command).error(f"which {options['engine']} server? Give its URL")
        return run_doctor_command(options["engine"], options["url"], os.environ.get("LOGITSHIP_API_KEY"))
    if command == "serve":
        model = options.pop("model", None)
        if model is not None and options.setdefault("model_path", model) != model:
            _command_parser(parser, command).error(
                f"two models: {model!r}, and {options['model_path']!r} of --model-path"
            )
        options = {**_environment_options(), **options}
    try:
        import torch  # noqa: F401  # missing if only the light client is installed
    except ImportError:
        print('This needs the server: pip install "logitship[serve]"', file=sys.stderr)
        return 1
    if command == "doctor":
        from .doctor.host_report import run_report_command

        return run_report_command(options["json"])
    if command == "check":
        return run_check_command(options)
    if command == "dev":
        return run_dev_command(options)
    if command == "detect-watermark":
        return run_detect_command(options)
    try:
        config = ServerConfig(**{name: _as_tuple(value) for name, value in options.items()})
    except ValueError as error:
        _command_parser(parser, command).error(str(error))
    try:
        return _COMMANDS[command](config)
    except StartError as error:
        print(f"logitship: {error}", file=sys.stderr)
        return 1


def _environment_options() -> dict[str, str | list[str]]:
    """Read API keys, which would be visible to other users on the command line, and RTP-LLM's `TREE_DECODE_CONFIG`."""
    keys = {field: f"LOGITSHIP_{field.upper()}" for field in ("api_key", "shipping_api_key", "metrics_api_key")}
    found: dict[str, str | list[str]] = {
        field: os.environ[name].split(",") for field, name in keys.items() if os.environ.get(name)
    }
    if os.environ.get("TREE_DECODE_CONFIG"):
        found["tree_decode_config"] = os.environ["TREE_DECODE_CONFIG"]
    return found


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _serve(config: ServerConfig) -> int:
    from .listening import open_sockets

    with ExitStack() as opened:
        # First: the model takes long.
        sockets = [opened.enter_context(each) for each in open_sockets(config.host, config.port)]
        return _serve_on(sockets, config)


def _serve_on(sockets: list[socket.socket], config: ServerConfig) -> int:
    with _without_garbage_collection():
        from logitship.server.engine.build import build_engine

        from .http_server import HTTPServer
        from .logs import set_up_logging
        from .shutdown_watchdog import ShutdownWatchdog

        set_up_logging(config.log_level, config.log_format)
        sys.setswitchinterval(_SWITCH_INTERVAL)
        engine = build_engine(config)
        server = HTTPServer(engine, ShutdownWatchdog(config.shutdown_timeout))
        engine.take_over_garbage_collection()
    try:
        server.run(sockets)
    except StartError:
        engine.stop()
        raise
    return 0 if server.started else 1


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block: the objects that a start imports and loads are no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _demo(config: ServerConfig) -> int:
    from .demo import run_demo

    # The demo ships only its own code: the server's warnings would clutter its output.
    logging.basicConfig(level="ERROR")
    return run_demo(config)


_COMMANDS = {"serve": _serve, "demo": _demo}

_CHECK_FIELDS = (
    "model_path",
    "tokenizer_path",
    "dtype",
    "device",
    "trust_remote_code",
    "processor_isolation",
    "sandbox_memory",
    "sandbox_cpu_time",
    "sandbox_step_timeout",
    "sandbox_first_step_timeout",
    "sandbox_load_timeout",
)
"""Server settings that `logitship check` takes."""

_DEV_FIELDS = ("model_path", "tokenizer_path", "dtype", "device", "trust_remote_code")
"""Server settings that `logitship dev` takes."""

_DETECT_FIELDS = ("watermark_key_file", "model_path", "tokenizer_path", "trust_remote_code")
"""Server settings that `logitship detect-watermark` takes."""

_DEMO_FIELDS = ("model_path", "processor_isolation")
"""Server settings that `logitship demo` takes."""


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line: the usage of `serve` alone takes forty."""

    def error(self, message: str) -> NoReturn:
        """End the process with an error."""
        self.exit(2, f"{self.prog}: error: {message} (all flags: {self.prog} --help)\n")


def _command_parser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    [commands] = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def _unknown_argument(parser: argparse.ArgumentParser, command: str, unknown: Sequence[str]) -> str:
    flag = next((each for each in unknown if each.startswith("--")), None)
    if flag is None:
        return f"unexpected argument {unknown[0]!r}"
    flag = flag.partition("=")[0]
    known = [each.removeprefix("--") for each in _command_parser(parser, command)._option_string_actions]
    close = difflib.get_close_matches(flag.removeprefix("--"), known, n=1)
    return f"unknown flag {flag}" + (f": did you mean --{close[0]}?" if close else "")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg]i?)?b?", re.IGNORECASE)


def _whole_number(text: str) -> int:
    """Parse a whole number.

    Raises:
        ArgumentTypeError: it is none. A size with a unit is answered in bytes.
    """
    try:
        return int(text)
    except ValueError:
        pass
    if (size := _SIZE.fullmatch(text)) and size[2]:
        number = int(float(size[1]) * _UNITS[size[2].lower()])
        raise argparse.ArgumentTypeError(f"{text!r} has a unit: if it is about bytes, write {number}")
    raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="logitship", description="LLM server with client-supplied logits processors.")
    parser.add_argument("--version", action="version", version=f"logitship {version('logitship')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    check = commands.add_parser("check", help="test a processor class the way a server runs it")
    dev = commands.add_parser("dev", help="run a processor class on a prompt each time its file is saved")
    demo = commands.add_parser("demo", help="ship two processors to a local server and show what they do")
    detect = commands.add_parser("detect-watermark", help="tell whether a text has the operator's watermark")
    doctor = commands.add_parser(
        "doctor",
        help="tell how this machine protects sandboxes, or what a running SGLang or vLLM server does with processors",
    )
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="the same as --model-path MODEL, as in vLLM",
    )
    doctor.add_argument(
        "engine",
        nargs="?",
        choices=[*DIAGNOSES],
        help="the engine of a running server; without it, versions, limits and protections of this machine are printed",
    )
    doctor.add_argument(
        "url", nargs="?", metavar="URL", help="its base URL; LOGITSHIP_API_KEY is its API key, if it has one"
    )
    doctor.add_argument("--json", action="store_true", help="print the report about this machine as JSON")
    for title, flags in FLAGS.items():
        group = serve.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
    add_check_arguments(check)
    for field in _CHECK_FIELDS:
        _add_flag(check, FLAG_OF_FIELD[field])
    add_dev_arguments(dev)
    for field in _DEV_FIELDS:
        _add_flag(dev, FLAG_OF_FIELD[field])
    add_detect_arguments(detect)
    for field in _DETECT_FIELDS:
        _add_flag(detect, FLAG_OF_FIELD[field])
    for field in _DEMO_FIELDS:
        _add_flag(demo, FLAG_OF_FIELD[field])
    return parser


def _add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    field = flag.field
    # Without the flag on the command line, `ServerConfig` sets the default; here it is only shown.
    default = ServerConfig.__dataclass_fields__[field].default
    text = flag.help if default in (None, False, ()) else f"{flag.help} (default: {default})"
    options: dict[str, Any] = {"dest": field, "default": argparse.SUPPRESS, "help": text}
    metavar = flag.metavar or field.rsplit("_", 1)[-1].upper()
    kind = setting_types()[field]
    kinds = [each for each in (*get_args(kind), kind) if each is not type(None)]
    if kind is bool:
        options |= {"action": "store_true"}
    elif isinstance(default, tuple):
        options |= {"action": "extend", "nargs": "+", "metavar": metavar}
    elif get_origin(kind) is Literal:
        options |= {"choices": get_args(kind)}
    elif get_origin(kinds[0]) is Literal:
        options |= {"choices": get_args(kinds[0])}
    else:
        # `int | None` is parsed as an int: leaving the flag out is how to get None.
        read = _whole_number if kinds[0] is int else kinds[0]
        options |= {"type": read, "metavar": metavar if kinds[0] is str else "N"}
    group.add_argument(*flag.spellings, **options)
