"""Warm-up of a sandbox before it gets a processor, which makes the first load and call faster.

A forked process shares its memory with the zygote copy-on-write. Python writes to most objects that it reads, because
of their reference counts: the first load and call of a processor copy some thousand pages. The warm-up does that before
a request waits for it.
"""

from __future__ import annotations

import marshal
from typing import Any

import torch

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.processors.request_view import ModelView

from .protocol import Command
from .worker import Worker


class _Example(CustomLogitProcessor):
    """Does what typical processors do."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or (), strict=True):
            row[params["banned"]] = -float("inf")
            row[params["__req__"].output_ids[-1]] += 1.0
        return logits.where(logits > 0, logits - 1.0)


def warm_up(logits: torch.Tensor, model: ModelView) -> None:
    """Run an example processor, and discard it.

    Args:
        logits: float32 [max_rows, vocab], the shared memory; all zeros again at the end.
        model: the model properties that a processor can read.
    """
    worker = Worker(logits, model, {})
    worker.use(_Example)
    first, second = b"\0" * 8, (1).to_bytes(8, "little")
    worker.handle(Command.ATTACH, marshal.dumps((0, "", {"banned": [0]}, first, second, {})))
    worker.handle(Command.STEP, marshal.dumps([(0, [])]))
    worker.handle(Command.DETACH, marshal.dumps(0))
    logits[:1].zero_()
