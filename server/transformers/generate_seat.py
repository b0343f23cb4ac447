"""The seat in `generate()` of Hugging Face transformers, which calls a logits processor with all rows of a step.

`generate()` passes the tokens of each row and their scores, and nothing about which sequence a row was before: beam
search reorders them. A row continues the row of the last call that has the same tokens but the last.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from transformers import LogitsProcessor

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.processors.params_checker import ParamsChecker
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.plugin_settings import SHARED_READERS, PluginSettings
from logitship.server.runtime.request_fields import read_several
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.runtime.seat import start_engine_worker
from logitship.server.runtime.tracked_request import TrackedRequest

logger = logging.getLogger("transformers.logitship")


@dataclass(frozen=True, kw_only=True)
class TransformersSettings(PluginSettings):
    """Settings, each also read from the variable of the same name in capitals, after `LOGITSHIP_TRANSFORMERS_`."""

    prefix = "LOGITSHIP_TRANSFORMERS_"
    readers = SHARED_READERS


class OneRank:
    """The ranks of a model that runs in one process. Implements `Ranks`."""

    is_first = True
    size = 1


class ShippedLogitsProcessor(LogitsProcessor):
    """Runs processors on all rows of `generate()`, in sandboxes: `logits_processor=[…]`.

    Greedy decoding, sampling and beam search, with one call of each processor for each token of a sequence, and a state
    of its own for each sequence. May be used for one `generate()` after the other. Use as a context manager, or call
    `close`.

    Args:
        model: the model that generates.
        tokenizer: its tokenizer, which processors get; None: they get none.
        processors: processor strings, classes, or `{"processor": …, "params": …}`, in the order in which they run.
        params: parameters of processors without their own: for all prompts, or a list with those of each prompt.
        max_rows: most rows of a step: prompts, times beams or returned sequences.
        settings: None: those of the environment.

    Raises:
        ValueError: a processor is malformed, or no sandbox can be started.
    """

    engine = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        processors: Sequence[str | type[CustomLogitProcessor] | Mapping[str, Any]],
        *,
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        max_rows: int = 64,
        settings: TransformersSettings | None = None,
    ) -> None:
        settings = settings or TransformersSettings.from_environment()
        config = model.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self._eos_token_ids = frozenset(token for token in ends if token is not None)
        self._pad_token_id = config.pad_token_id
        self._params = [params] if params is None or isinstance(params, Mapping) else list(params)
        self._requested = _read(processors, settings)
        vocab_size = model.get_output_embeddings().weight.shape[0]
        view = ModelView(vocab_size, self._eos_token_ids, tokenizer)
        worker = start_engine_worker(settings, view, OneRank(), max_rows, logger, params_checker=ParamsChecker())
        self._worker = worker
        self._runtime = RequestRuntime(self, worker)
        self._roots: list[TrackedRequest] = []
        self._sequences: dict[tuple[int, ...], list[TrackedRequest]] = {}
        """Sequences of the last call by their prompt's number and their tokens. Several may be equal."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Run the processors.

        Args:
            input_ids: [rows, length].
            scores: [rows, vocab], not changed.

        Returns:
            The edited scores.

        Raises:
            ProcessorFault: a processor failed, or cannot be loaded. `generate()` ends with it.
        """
        scores = scores.clone()
        # Rows of different prompts are never taken for each other, though their tokens may be equal.
        prompts = [number * len(self._params) // len(scores) for number in range(len(scores))]
        rows = self._follow([(prompt, *row) for prompt, row in zip(prompts, input_ids.tolist(), strict=True)])
        with self._runtime.or_fail(rows):
            self._runtime.begin_step()
            for request in rows:
                if request.params is None and request.fault is None and not request.is_complete:
                    self._runtime.load(request)
            self._runtime.apply(scores, dict(enumerate(rows)), len(rows))
        fault = next((request.fault for request in rows if request.fault is not None), None)
        if fault is not None:
            self._release()
            raise fault
        return scores

    def _follow(self, rows: Sequence[tuple[int, ...]]) -> list[TrackedRequest]:
        """Return the sequence of each row, and drop those that no row continues.

        Args:
            rows: the number of the prompt and the tokens of each row.
        """
        continued: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            continued[row[:-1]].append(number)
        if not self._sequences or not continued.keys() <= self._sequences.keys():
            self._release()
            self._roots = [self._track(number, row[0], row[1:]) for number, row in enumerate(rows)]
            following = dict(enumerate(self._roots))
        else:
            following = {}
            for history, numbers in continued.items():
                parents = self._sequences[history]
                # Beams of one prompt that are equal may differ in their states: each takes a sequence of its own.
                for place, number in enumerate(numbers):
                    if place >= len(parents):
                        following[number] = self._runtime.fork(parents[0], rows[number][-1])
                for parent, number in zip(parents, numbers, strict=False):
                    following[number] = parent
            kept = set(map(id, following.values()))
            self._runtime.drop(each for some in self._sequences.values() for each in some if id(each) not in kept)
            for number, request in following.items():
                if len(request.prompt_token_ids) + len(request.output_token_ids) < self._length(request, rows[number]):
                    request.output_token_ids.append(rows[number][-1])
        self._sequences = {}
        for number, row in enumerate(rows):
            self._sequences.setdefault(row, []).append(following[number])
        return [following[number] for number in range(len(rows))]

    def _length(self, request: TrackedRequest, row: tuple[int, ...]) -> int:
        """Return the number of known tokens of a sequence after this step: one that has ended is padded."""
        return 0 if request.is_complete else len(row) - 1 - request.record.num_padding

    def _track(self, number: int, prompt: int, tokens: tuple[int, ...]) -> TrackedRequest:
        padding = 0
        while padding < len(tokens) - 1 and tokens[padding] == self._pad_token_id:
            padding += 1
        record = _GenerateRow(self._params[prompt], padding)
        return TrackedRequest(record, f"generate-{number}", list(tokens[padding:]), self._eos_token_ids)

    def _release(self) -> None:
        """Release the processors of all sequences."""
        if self._roots:
            self._runtime.drop(each for some in self._sequences.values() for each in some)
            self._runtime.release(self._roots)
        self._roots, self._sequences = [], {}

    def processors_of(self, request: TrackedRequest) -> Sequence[ProcessorRequest]:
        """See `EngineSeat.processors_of`."""
        return [each if each.own else replace(each, params=request.record.params) for each in self._requested]

    def sampling_params_of(self, request: TrackedRequest, uses: Sequence[ProcessorUse]) -> SamplingParams:
        """See `EngineSeat.sampling_params_of`. `generate()` does not tell its logits processors any."""
        return SamplingParams(eos_token_ids=self._eos_token_ids, processors=tuple(uses))

    def editing(self, logits: torch.Tensor, running: Mapping[int, TrackedRequest]) -> contextlib.nullcontext[None]:
        """See `EngineSeat.editing`."""
        return contextlib.nullcontext()

    def repeat(self, logits: torch.Tensor, repeated: Mapping[int, TrackedRequest]) -> None:
        """See `EngineSeat.repeat`. `generate()` drops no tokens."""
        for request in repeated.values():
            request.fail("generate() samples a token again that its processors were called for")

    def defer(self, late: Mapping[int, TrackedRequest]) -> Collection[int]:
        """Return no rows: there are no other requests that would wait."""
        return ()

    def close(self) -> None:
        """End the sandboxes."""
        self._release()
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _GenerateRow:
    """`generate()`'s part of a `TrackedRequest`.

    Attributes:
        params: parameters of its processors.
        num_padding: number of tokens before its prompt.
    """

    params: Mapping[str, Any] | None
    num_padding: int


def _read(processors: Sequence[Any], settings: TransformersSettings) -> list[ProcessorRequest]:
    entries = [each if isinstance(each, Mapping) else {"processor": each} for each in processors]
    strings = [
        {**each, "processor": each["processor"].to_str()} if hasattr(each.get("processor"), "to_str") else each
        for each in entries
    ]
    strings += [dict(default.entry) for default in settings.default_processors]
    return [*read_several(strings, "generate()", max_processor_size=settings.max_processor_size)]
