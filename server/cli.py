"""The command line: `logitship serve`, `logitship check` and `logitship demo`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal, get_args, get_origin, get_type_hints

from logitship.server.check.command import add_arguments as add_check_arguments
from logitship.server.check.command import run_command as run_check_command

from .config import ServerConfig
from .refusals import StartError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    if command == "serve":
        options = {**_of_environment(), **options}
    try:
        import torch  # noqa: F401  # the client alone is installed without it
    except ImportError:
        print('This needs the server: pip install "logitship[serve]"', file=sys.stderr)
        return 1
    if command == "check":
        return run_check_command(options)
    try:
        config = ServerConfig(**{name: _frozen(value) for name, value in options.items()})
    except ValueError as error:
        parser.error(str(error))
    try:
        return _COMMANDS[command](config)
    except StartError as error:
        print(f"logitship: {error}", file=sys.stderr)
        return 1


def _of_environment() -> dict[str, str | list[str]]:
    """API keys, from where other users of the machine do not see them, and what RTP-LLM takes from there."""
    keys = {"api_key": "LOGITSHIP_API_KEY", "shipping_api_key": "LOGITSHIP_SHIPPING_API_KEY"}
    found: dict[str, str | list[str]] = {
        field: os.environ[name].split(",") for field, name in keys.items() if os.environ.get(name)
    }
    if os.environ.get("TREE_DECODE_CONFIG"):
        found["tree_decode_config"] = os.environ["TREE_DECODE_CONFIG"]
    return found


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _serve(config: ServerConfig) -> int:
    from logitship.server.engine.build import build_engine

    from .http_server import HTTPServer
    from .logs import set_up_logging

    set_up_logging(config.log_level, config.log_format)
    server = HTTPServer(build_engine(config))
    server.run()
    return 0 if server.started else 1


def _demo(config: ServerConfig) -> int:
    from .demo import run_demo

    # It prints for people, and ships nothing but its own code: the server's warnings would only get in between.
    logging.basicConfig(level="ERROR")
    return run_demo(config)


_COMMANDS = {"serve": _serve, "demo": _demo}

# Group, flag and its other spellings, help. The first spelling is the field of `ServerConfig`, which has the default
# and the type. SGLang's and vLLM's names for the same thing are both taken.
_FLAGS: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "model": [
        (("--model-path", "--model"), "a Hugging Face folder, a GGUF file, a hub name, or the default model's name"),
        (("--tokenizer-path", "--tokenizer"), "where the tokenizer is, if not with the model"),
        (("--served-model-name",), "the name under which clients ask for the model"),
        (("--dtype",), "type of the weights; auto: float32 on a CPU, the checkpoint's own elsewhere"),
        (("--device",), "cpu, cuda, cuda:1, …; auto: a GPU if there is one"),
        (("--model-impl",), "transformers: the model's own code; auto: faster layers where they are known"),
        (("--chat-template",), "a file with a Jinja template, instead of the tokenizer's"),
        (("--trust-remote-code",), "run code that comes with the model's folder"),
    ],
    "engine": [
        (("--max-num-seqs", "--max-running-requests"), "sequences that decode together"),
        (("--max-model-len", "--context-length"), "longest prompt and output together, in tokens"),
        (("--max-queued-requests",), "requests that may wait; more are refused with 429"),
        (("--chunked-prefill-size",), "most prompt tokens computed in one step beside the running sequences"),
        (("--mem-fraction-static", "--gpu-memory-utilization"), "share of the free memory for keys and values"),
        (
            ("--prefix-cache-bytes",),
            "bytes of it for what earlier requests began with, which is not computed again; 0: none (default: a tenth)",
        ),
        (("--random-seed", "--seed"), "seeds the requests that bring no seed of their own"),
        (("--enable-deterministic-inference",), "the same bits whatever else runs: read docs/deterministic.md first"),
        (("--speculative-algorithm",), "NGRAM: check several tokens in a step where a text repeats itself"),
        (("--speculative-num-draft-tokens",), "most tokens of a sequence that a step checks ahead"),
    ],
    "sampling": [
        (("--max-logprobs",), "most log-probabilities that a request may ask for at each position"),
        (("--logprobs-mode",), "before any edit (raw), or after all of them (processed), unless the request says"),
        (
            ("--reasoning-config",),
            'start and end of the model\'s thinking, for budgets: {"reasoning_start_str": …, "reasoning_end_str": …}',
        ),
    ],
    "processors": [
        (("--enable-custom-logit-processor",), "run processors that come with requests: read docs/security.md first"),
        (("--logits-processors",), "batch processors to install: module:Class, or JSON with qualname, args, kwargs"),
        (("--logits-processor-pattern",), "callables that requests may name: a regular expression, matched in full"),
        (("--allow-processor",), "a file with the digests of the only processors that may be shipped, one a line"),
        (
            ("--tree-decode-config", "--tree_decode_config"),
            "a file with a tree of tokens that every request follows; or in $TREE_DECODE_CONFIG",
        ),
        (("--tree",), "trees of tokens that requests can ask for by name"),
        (("--max-processor-size",), "longest processor string, in bytes"),
        (("--processor-cache-entries",), "most shipped processors kept loaded, and most registered ones"),
        (("--processor-cache-bytes",), "most bytes of shipped processors kept loaded, and of registered ones"),
    ],
    "isolation": [
        (("--processor-isolation",), "where shipped code runs; none: in the server's own process, with all its rights"),
        (("--max-sandboxes",), "most shipped processors kept loaded in sandboxes, each a process"),
        (("--sandbox-memory",), "bytes that a sandbox may take, beyond what torch takes"),
        (("--sandbox-cpu-time",), "seconds of CPU time that a sandbox may burn outside its calls"),
        (("--sandbox-step-timeout",), "seconds that a call of a shipped processor may take"),
        (("--sandbox-load-timeout",), "seconds that it may take to load one"),
    ],
    "HTTP": [
        (("--host",), "address to listen on"),
        (("--port",), "port to listen on; 0: any free one"),
        (("--api-key",), "bearer tokens, of which every request must carry one; or in $LOGITSHIP_API_KEY, with commas"),
        (
            ("--shipping-api-key",),
            "tokens that may ship processors, which the others then may not; or in $LOGITSHIP_SHIPPING_API_KEY",
        ),
        (("--max-request-bytes",), "longest request body, in bytes"),
        (("--disable-playground",), "do not serve the playground, the page at /"),
        (("--shutdown-timeout",), "seconds that running requests get to finish after SIGTERM"),
        (("--log-level",), "how much to log"),
        (("--log-format",), "lines for people, or a JSON object a line"),
    ],
}


_FIELDS_OF_CHECK = (
    "model_path",
    "tokenizer_path",
    "dtype",
    "device",
    "trust_remote_code",
    "processor_isolation",
    "sandbox_memory",
    "sandbox_cpu_time",
    "sandbox_step_timeout",
    "sandbox_load_timeout",
)
"""What `check` takes of a server's settings."""


def spellings() -> dict[str, dict[str, str]]:
    """Of each group of flags: every spelling, as a Python name, and the field of `ServerConfig` that it sets."""
    return {
        group: {_python_name(name): _python_name(names[0]) for names, _ in flags for name in names}
        for group, flags in _FLAGS.items()
    }


def help_of_fields() -> dict[str, str]:
    """What the flag of each field of `ServerConfig` says of it."""
    return {_python_name(names[0]): text for flags in _FLAGS.values() for names, text in flags}


def _python_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="logitship", description="Logits processors that arrive with the request.")
    parser.add_argument("--version", action="version", version=f"logitship {version('logitship')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    check = commands.add_parser("check", help="try a processor class as a server would run it")
    demo = commands.add_parser("demo", help="ship two processors and see what they do")
    for title, flags in _FLAGS.items():
        group = serve.add_argument_group(title)
        for names, text in flags:
            _add_flag(group, names, text)
    add_check_arguments(check)
    for field in _FIELDS_OF_CHECK:
        _add_flag(
            check, *next(flag for flags in _FLAGS.values() for flag in flags if _python_name(flag[0][0]) == field)
        )
    _add_flag(demo, *_FLAGS["model"][0])
    _add_flag(demo, *next(flag for flag in _FLAGS["isolation"] if flag[0] == ("--processor-isolation",)))
    return parser


_METAVARS = {
    "allow_processor": "FILE",
    "tree": "NAME=FILE",
    "tree_decode_config": "FILE",
    "logits_processors": "NAME",
    "reasoning_config": "JSON",
}
"""Where the last word of the flag says too little."""


def _add_flag(group: argparse._ActionsContainer, names: tuple[str, ...], text: str) -> None:
    field = _python_name(names[0])
    # What is not said on the command line is left to `ServerConfig`; here the default is only shown.
    default = ServerConfig.__dataclass_fields__[field].default
    if default not in (None, False, ()):
        text += f" (default: {default})"
    kind = get_type_hints(ServerConfig)[field]
    metavar = _METAVARS.get(field, field.rsplit("_", 1)[-1].upper())
    if kind is bool:
        group.add_argument(*names, dest=field, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    if isinstance(default, tuple):
        group.add_argument(
            *names, dest=field, action="extend", nargs="+", default=argparse.SUPPRESS, metavar=metavar, help=text
        )
        return
    # `int | None` reads an int: no flag is how None is said.
    if get_origin(kind) is not Literal:
        kind = next(k for k in (*get_args(kind), kind) if k is not type(None))
    choices = get_args(kind) if get_origin(kind) is Literal else None
    parse = str if choices else kind
    shown = None if choices else metavar if parse is str else "N"
    group.add_argument(
        *names, dest=field, type=parse, choices=choices, default=argparse.SUPPRESS, metavar=shown, help=text
    )
