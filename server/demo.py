"""`logitship demo`: start a server, ship two processors to it, and show their effect."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from logitship.client.async_client import AsyncClient
from logitship.client.processor import CustomLogitProcessor
from logitship.client.records import Generation, Receipt
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor, parse

from . import demo_processors
from .config import DEFAULT_MODEL, ServerConfig
from .demo_processors import Alliteration, Lipogram

PROMPTS = ("What is the moon?", "What is a good way to spend a rainy day?")
MAX_TOKENS = 48
REPETITION_PENALTY = 1.1
"""A model this small repeats itself without a penalty."""
MIN_COLUMN_WIDTH = 22
MAX_PAGE_WIDTH = 120


@dataclass(frozen=True)
class Variant:
    """A way to generate the responses.

    Attributes:
        title: heading of its column.
        explanation: what the processor does.
        processor: the class to ship, or None for the plain model.
        params: its parameters.
    """

    title: str
    explanation: str = ""
    processor: type[CustomLogitProcessor] | None = None
    params: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("Plain model"),
    Variant("Lipogram", 'no token with an "e" can be sampled', Lipogram, {"letter": "e"}),
    Variant("Alliteration", 'words that begin with "s" become more likely', Alliteration, {"letter": "s"}),
)


def run_demo(config: ServerConfig) -> int:
    """Start a server, send the requests, print the results, and stop. Returns the exit status.

    Args:
        config: the model and the isolation; the demo sets the rest itself.
    """
    from .http_server import running_server

    width = min(shutil.get_terminal_size().columns, MAX_PAGE_WIDTH)
    _print(f"1. Starting a server on this machine, with {config.model_name}.")
    if config.model_path == DEFAULT_MODEL:
        _print("   The first run downloads the model (93 MB) and converts it; later runs reuse it.")
    started = time.perf_counter()
    with running_server(demo_config(config)) as base_url:
        _print(f"   {base_url} is up after {time.perf_counter() - started:.0f} s.\n")
        _print("2. Serializing two classes to processor strings, which are sent with the requests:")
        _print(describe_shipment(VARIANTS))
        requests = len(PROMPTS) * len(VARIANTS)
        _print(f"3. Asking {len(PROMPTS)} questions in {len(VARIANTS)} variants: {requests} concurrent requests.")
        started = time.perf_counter()
        answers = asyncio.run(ask_all(base_url))
        _print(f"   Done after {time.perf_counter() - started:.0f} s.\n")
    for prompt, generations in zip(PROMPTS, answers, strict=True):
        _print(f"   {prompt}\n")
        columns = [(variant.title, displayed_text(each)) for variant, each in zip(VARIANTS, generations, strict=True)]
        _print(textwrap.indent(side_by_side(columns, width - 3), "   ") + "\n")
    _print("4. The receipts, which prove that the processors were applied:")
    _print(describe_receipts([receipt for row in answers for each in row for receipt in each.receipts]))
    _print(WHAT_NEXT)
    return 0


WHAT_NEXT = f"""\
The server is stopped. Next steps:
   Read the two classes: {demo_processors.__file__}
   Start a server: logitship serve --enable-custom-logit-processor
   Write and ship a processor of your own: docs/tutorial.md"""


def demo_config(config: ServerConfig) -> ServerConfig:
    """Derive the config of the demo's server: local, on a free port, quiet, and with shipped code enabled."""
    return replace(
        config,
        host="127.0.0.1",
        port=0,
        api_key=(),
        shipping_api_key=(),
        metrics_api_key=(),
        enable_custom_logit_processor=True,
        log_level="warning",
    )


async def ask_all(base_url: str) -> list[list[Generation]]:
    """Generate all variants of all prompts concurrently; one list per prompt."""
    async with AsyncClient(base_url) as client:
        return [
            list(row)
            for row in await asyncio.gather(
                *(asyncio.gather(*(_ask(client, prompt, variant) for variant in VARIANTS)) for prompt in PROMPTS)
            )
        ]


async def _ask(client: AsyncClient, prompt: str, variant: Variant) -> Generation:
    return await client.chat(
        [{"role": "user", "content": prompt}],
        processor=variant.processor,
        params=variant.params or None,
        max_tokens=MAX_TOKENS,
        temperature=0,
        repetition_penalty=REPETITION_PENALTY,
    )


def describe_shipment(variants: Sequence[Variant]) -> str:
    """Describe each processor: its effect, its size on the wire, and its digest."""
    lines = []
    for variant in variants:
        if variant.processor is None:
            continue
        text = variant.processor.to_str()
        string = parse(text)
        assert isinstance(string, PickledProcessor | SourceProcessor)
        lines.append(f"   {variant.processor.__name__}: {variant.explanation}")
        lines.append(f"      {len(text):,} bytes, {string.digest[:26]}…\n")
    return "\n".join(lines)


def describe_receipts(receipts: Sequence[Receipt]) -> str:
    """Format the receipts, one line each."""
    widest = max((len(receipt.name) for receipt in receipts), default=0)
    return "\n".join(
        f"   {receipt.name:<{widest}}  {receipt.digest[:26]}…  {receipt.steps:>3} steps  {receipt.milliseconds:7.1f} ms"
        for receipt in receipts
    ) + ("\n" if receipts else "")


def displayed_text(generation: Generation) -> str:
    """Return the text, with an ellipsis if it was cut off."""
    cut = generation.finish_reason is not None and generation.finish_reason.kind == "length"
    return generation.text.strip() + (" …" if cut else "")


def side_by_side(columns: Sequence[tuple[str, str]], width: int) -> str:
    """Lay out titled texts in columns of equal width, or one below the other on a narrow page.

    Args:
        columns: (title, text) pairs.
        width: of the page, in characters.
    """
    gap = 3
    column = (width - gap * (len(columns) - 1)) // len(columns)
    if column < MIN_COLUMN_WIDTH:
        return "\n\n".join("\n".join(_block(title, text, max(width, MIN_COLUMN_WIDTH))) for title, text in columns)
    blocks = [_block(title, text, column) for title, text in columns]
    height = max(len(block) for block in blocks)
    rows = zip(*(block + [""] * (height - len(block)) for block in blocks), strict=True)
    return "\n".join((" " * gap).join(cell.ljust(column) for cell in row).rstrip() for row in rows)


def _block(title: str, text: str, width: int) -> list[str]:
    """Wrap a column. Line breaks of the text are kept."""
    lines = [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, width) or [""]]
    return [*textwrap.wrap(title, width), "-" * min(len(title), width), *lines]


def _print(text: str) -> None:
    """Print and flush: the next step may take a while."""
    print(text, flush=True)
