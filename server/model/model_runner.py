"""Runs the model: packed tokens in, logits of the selected positions out.

Each thread that computes a forward pass is bound to its own core. PyTorch divides an operation among a team of OpenMP
threads: the calling thread, and workers that sleep after some idle milliseconds. Linux often wakes a worker on the core
of the thread that wakes it. That thread then spins while it waits, and the worker cannot run until the system migrates
it after 10 to 40 ms. On a busy machine, this slows the first step after each pause.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from transformers import PreTrainedModel

from logitship.server.refusals import UnsupportedModel

from .attention import ATTENTION_NAME, Segment, StepLayout, register
from .deterministic import make_deterministic
from .fused_decoder import FusedDecoder, can_fuse
from .kv_cache import CacheShape, SlotCache

logger = logging.getLogger(__name__)
_TASKS = Path("/proc/self/task")
_MARK = "omp-team"
_DIVIDED = 1 << 20
"""Number of elements at which PyTorch divides an operation among all threads."""

_NUM_FIRST_TOKENS = 6
_FUSED_TOLERANCE = 1e-3
"""Largest difference of fused layers, relative to the largest logit. An error, such as heads in wrong order, makes it
far larger."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute in this pass, from position `start` of its slot."""

    slot: int
    start: int
    token_ids: Sequence[int]


class OutputLogits(Protocol):
    """Logits of the kept tokens of a forward pass, computed when they are asked for.

    The LM head of a small model is a quarter of its arithmetic. A token whose successor is certain, or one of a few,
    needs only a few of its columns. The tokens are numbered by their place among the kept ones.
    """

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return all logits of some tokens, float32 [end - begin, vocab]."""
        ...

    def some(self, places: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return single logits, float32 [n].

        Args:
            places: int64 [n], on the CPU.
            token_ids: int64 [n], the token of each.
        """
        ...


class ComputedLogits:
    """`OutputLogits` of a model that has computed them all.

    Args:
        logits: float32 [tokens, vocab].
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """See `OutputLogits`."""
        return self._logits[begin:end]

    def some(self, places: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `OutputLogits`."""
        return self._logits[places, token_ids]


class ModelRunner:
    """A transformers model for causal language modelling on top of a `SlotCache`."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_len: int,
        *,
        deterministic: bool = False,
        fused: bool = True,
        cores: AbstractContextManager[None] | None = None,
    ) -> None:
        """Prepare a model, in place, and allocate its cache.

        Args:
            model: the model; its modules may be replaced.
            num_slots: sequences that the cache holds.
            max_len: longest sequence, in tokens.
            deterministic: batch-invariant: compute each token independently, to the last bit.
            fused: use `FusedDecoder`, which has fewer and larger operations than the model's own code, if it supports
                the model and `deterministic` is off.
            cores: entered for each forward pass: a `CoreBinding` of the calling thread.

        Raises:
            UnsupportedModel: its layers are not plain attention, or computing a first token fails.
        """
        _require_plain_attention(model)
        if deterministic:
            make_deterministic(model)
        else:
            register()
            model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.train(False)
        self.device = model.device
        self.dtype = model.dtype
        self.cache = SlotCache(cache_shape(model, num_slots, max_len), self.dtype, self.device)
        self._cores = cores or nullcontext()
        self._fused: FusedDecoder | None = None
        self._check_first_token()
        if fused and not deterministic and can_fuse(model):
            self._fuse()

    def logits(self, decode: list[Chunk], prefill: list[Chunk], keep: list[int]) -> torch.Tensor:
        """Compute the next tokens of some sequences.

        Args:
            decode: chunks of few tokens: the last sampled token, and its draft.
            prefill: prompt chunks.
            keep: indices of the tokens whose logits are returned, in this order; tokens are numbered through `decode`,
                then `prefill`. The hidden states are selected before the LM head, which is far cheaper than selecting
                logits.

        Returns:
            float32 [len(keep), vocab].
        """
        return self.forward(decode, prefill, keep, len(keep))[0]

    @torch.no_grad()
    def forward(
        self, decode: list[Chunk], prefill: list[Chunk], keep: list[int], num_complete: int
    ) -> tuple[torch.Tensor, OutputLogits]:
        """Compute the next tokens of some sequences, as `logits`, and all logits of a part of the kept tokens.

        Args:
            decode: see `logits`.
            prefill: see `logits`.
            keep: see `logits`.
            num_complete: number of kept tokens, from the first on, of which all logits are needed.

        Returns:
            Their logits, float32 [num_complete, vocab], and an object that computes those of all kept tokens.
        """
        with self._cores:
            output = self._forward(decode, prefill, keep)
            return output.rows(0, num_complete), output

    def _forward(self, decode: list[Chunk], prefill: list[Chunk], keep: list[int]) -> OutputLogits:
        layout = StepLayout(_segments(decode), _segments(prefill), self.cache, self.dtype, self.device)
        token_ids = torch.tensor(
            [token for chunk in (*decode, *prefill) for token in chunk.token_ids], device=self.device
        )
        indices = torch.tensor(keep, dtype=torch.long, device=self.device)
        if self._fused is not None:
            return self._fused.forward(token_ids, layout, indices)
        return ComputedLogits(self._forward_model(token_ids, layout, indices))

    def _forward_model(self, token_ids: torch.Tensor, layout: StepLayout, keep: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=layout.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            step=layout,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _fuse(self) -> None:
        """Use the fused layers if their logits equal those of the model's own code up to rounding."""
        expected = self._first_logits()
        self._fused = FusedDecoder(self.model)
        found = self._first_logits()
        if not torch.allclose(found, expected, rtol=0, atol=_FUSED_TOLERANCE * float(expected.abs().max())):
            self._fused = None
            logger.warning(
                "%s runs with the slower code of transformers: the logits of fused layers differ by up to %.2g",
                type(self.model).__name__,
                float((found - expected).abs().max()),
            )

    def _first_logits(self) -> torch.Tensor:
        """Return the logits of a short prompt and of one decoded token after it: float32 [tokens, vocab]."""
        step = self.model.config.vocab_size // _NUM_FIRST_TOKENS
        *prompt, last = range(0, step * _NUM_FIRST_TOKENS, step)
        prefill = self.logits([], [Chunk(0, 0, prompt)], [*range(len(prompt))])
        return torch.cat([prefill, self.logits([Chunk(0, len(prompt), [last])], [], [0])])

    def _check_first_token(self) -> None:
        """Compute one token, so that an unsupported model is refused at start and not at the first request."""
        name = type(self.model).__name__
        try:
            # The same index twice shows whether the model implements `logits_to_keep`.
            logits = self.logits([], [Chunk(0, 0, [0])], [0, 0])
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UnsupportedModel(f"{name} cannot be served: its first token failed: {error}") from error
        if len(logits) != 2:
            raise UnsupportedModel(f"{name} cannot be served: it returns logits of other tokens than those selected")


def _segments(chunks: list[Chunk]) -> list[Segment]:
    return [Segment(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in chunks]


def cache_shape(model: PreTrainedModel, num_slots: int, max_len: int) -> CacheShape:
    """Return the shape of a model's cache for `num_slots` sequences of `max_len` tokens."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return CacheShape(
        num_layers=config.num_hidden_layers,
        num_slots=num_slots,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        max_len=max_len,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _require_plain_attention(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    reasons = {
        f"layers of type {', '.join(sorted(kinds))}": bool(kinds),
        "an encoder": bool(getattr(config, "is_encoder_decoder", False)),
        "softcapped attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "no support for exchangeable attention functions": not getattr(model, "_supports_attention_backend", False),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModel(f"{type(model).__name__} cannot be served: it has {reason}")


class CoreBinding:
    """Binds the thread that creates it inside a `with` block, and its OpenMP workers permanently.

    The thread is bound in the block only, because new threads and processes inherit its affinity; a forward pass starts
    none. Does nothing if the team is smaller than the number of cores that this process may use: it cannot know which
    cores are free, and two servers would choose the same.
    """

    def __init__(self) -> None:
        self._all_cores: set[int] = set()
        self._own_core: set[int] = set()
        if not _TASKS.exists():
            return
        cores = sorted(os.sched_getaffinity(0))
        workers = _workers() if 1 < torch.get_num_threads() == len(cores) else []
        if len(workers) == len(cores) - 1 > 0:
            self._all_cores, self._own_core = set(cores), {cores[0]}
            for worker, core in zip(workers, cores[1:], strict=True):
                os.sched_setaffinity(worker, {core})

    def __enter__(self) -> None:
        if self._own_core:
            os.sched_setaffinity(0, self._own_core)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._own_core:
            os.sched_setaffinity(0, self._all_cores)


def _workers() -> list[int]:
    """Return the thread ids of the calling thread's OpenMP workers.

    A thread inherits the name of the thread that starts it. So this thread is renamed during its first operation that
    needs the team. Workers that were started before are not found.
    """
    own = threading.get_native_id()
    name = _TASKS / str(own) / "comm"
    before = name.read_text()
    name.write_text(_MARK)
    try:
        torch.ones(_DIVIDED).add_(1)
    finally:
        name.write_text(before.strip())
    return [task for task in sorted(map(int, os.listdir(_TASKS))) if task != own and _name(task) == _MARK]


def _name(task: int) -> str:
    try:
        return (_TASKS / str(task) / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
