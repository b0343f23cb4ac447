"""`logitship detect-watermark`: tells whether a text has the operator's watermark."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ServerConfig
from .refusals import StartError

if TYPE_CHECKING:  # it needs torch, which is imported when the command runs
    from logitship.builtin_processors.watermark_detector import WatermarkEvidence

OK, NOT_TESTED = 0, 2
"""Exit statuses: the text was tested, whatever the result; it could not be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, except for the server's flags."""
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the text; -, the default: stdin")
    parser.add_argument(
        "--processor",
        default="watermark_kgw",
        metavar="NAME",
        help="watermark_kgw or watermark_synthid (default: watermark_kgw)",
    )
    parser.add_argument(
        "--params", default="{}", metavar="JSON", help="parameters of the processor that marked the text, as JSON"
    )
    parser.add_argument(
        "--token-ids", action="store_true", help="the file has the token ids of the text, as a list in JSON"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the result as JSON")


def run_command(options: dict[str, Any]) -> int:
    """Test a text, print the result, and return the exit status.

    Args:
        options: the parsed arguments: those of `add_arguments`, and fields of `ServerConfig`.
    """
    known = {field.name for field in dataclasses.fields(ServerConfig)}
    try:
        config = ServerConfig(**{name: value for name, value in options.items() if name in known})
        evidence = _detect(config, options)
    except (StartError, ValueError) as error:
        print(f"logitship detect-watermark: {error}", file=sys.stderr)
        return NOT_TESTED
    print(json.dumps(_as_json(evidence), indent=2) if options["as_json"] else _as_text(evidence))
    return OK


def _detect(config: ServerConfig, options: dict[str, Any]) -> WatermarkEvidence:
    from logitship.builtin_processors.watermark_detector import detect_watermark

    from .model.model_loader import load_vocabulary

    if config.watermark_key is None:
        raise ValueError("name the file with the key: --watermark-key-file FILE")
    params = _parse(options["params"], dict, "--params: expected a JSON object")
    text = _read(options["file"])
    token_ids = _parse(text, list, "expected a list of token ids, as JSON") if options["token_ids"] else None
    if token_ids is not None and not all(type(token) is int for token in token_ids):
        raise ValueError("expected a list of token ids, as JSON: one is not an integer")
    tokenizer, vocab_size = load_vocabulary(config)
    if token_ids is None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    return detect_watermark(token_ids, config.watermark_key, options["processor"], params, vocab_size=vocab_size)


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _parse(text: str, kind: type, expected: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(expected)
    return value


def _as_json(evidence: WatermarkEvidence) -> dict[str, Any]:
    """Return the result as an object, with null for a score that there is not."""
    return dataclasses.asdict(evidence) | ({} if evidence.num_scored else {"score": None})


def _as_text(evidence: WatermarkEvidence) -> str:
    return "\n".join(
        (
            f"watermark:  {evidence.processor}",
            f"tokens:     {evidence.num_tokens}, of which {evidence.num_scored} are scored",
            f"score:      {evidence.score:.4f} (texts without the mark: {evidence.expected_score:.4f})",
            f"z-score:    {evidence.z_score:.2f}",
            f"p-value:    {evidence.p_value:.3g}",
        )
    )
