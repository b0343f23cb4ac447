"""The processors that came with requests, together one batch processor (contract 3).

`ShippedProcessors` follows the persistent batch, keeps the rows of each processor as a group, and calls each processor
once a step with the rows of its group and nothing else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.client.records import Receipt

from .author_code import non_finite_fault
from .batch_rows import BatchRows
from .interface import BatchUpdate, LogitsProcessor
from .processor_host import LoadedProcessor
from .request_view import OutputFollower, RequestView
from .sampling_params import SamplingParams


@dataclass(eq=False)
class ProcessorUse:
    """One request's use of one processor. Not shared: the counters are this request's.

    Attributes:
        params: the request's parameters for it, `custom_params` in SGLang's words.
        rid: the request id.
        steps: decoding steps to which it was applied so far.
        seconds: time spent so far: a call's time divided by its rows.
    """

    processor: LoadedProcessor
    params: dict[str, Any]
    rid: str
    steps: int = 0
    seconds: float = 0.0

    @property
    def receipt(self) -> Receipt:
        """What the response says of it."""
        return Receipt(self.processor.digest, self.processor.name, self.steps, round(self.seconds * 1e3, 3))


@dataclass(frozen=True)
class ModelView:
    """What processors may know of the model: the same for all requests."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any


@dataclass(frozen=True)
class _Row:
    """A use in its place: `params` is what the processor receives for this row, `__req__` included."""

    use: ProcessorUse
    output: OutputFollower
    params: dict[str, Any]


@dataclass
class _Group:
    """All rows of one processor, at one place in its requests' lists.

    Attributes:
        stage: that place: 0 for a request's first processor. Stages run in order.
        rows: row numbers, ascending.
    """

    stage: int
    processor: LoadedProcessor
    rows: list[int] = field(default_factory=list)
    members: list[_Row] = field(default_factory=list)

    @property
    def adjacent(self) -> bool:
        """True if the rows follow one another: the group is then a view of the logits."""
        return self.rows[-1] - self.rows[0] + 1 == len(self.rows)


class ShippedProcessors(LogitsProcessor):
    """See the module's text.

    Args:
        model: what they may know of the model.
        uses: finds a request's processors in its sampling params.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,
        *,
        model: ModelView,
        uses: Callable[[SamplingParams], Sequence[ProcessorUse]] = attrgetter("processors"),
    ) -> None:
        self._model = model
        self._uses = uses
        self._rows: BatchRows[list[_Row]] = BatchRows(self._attach)
        self._groups: list[_Group] = []
        self._faults: dict[int, ProcessorFault] = {}

    def is_argmax_invariant(self) -> bool:
        """False: a shipped processor may do anything to its rows."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and the outputs of the rows that have a processor."""
        if batch_update is not None and self._rows.update(batch_update):
            self._groups = self._grouped()
        for group in self._groups:
            for member in group.members:
                member.output.sync()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run every group on its own rows, in place.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            `logits`. The rows of `take_faults()` are zeros: the caller must not use them.
        """
        self._faults = {}  # a step that failed elsewhere may have left some
        for group in self._groups:
            healthy = group if not self._faults else self._without_faulty_rows(group)
            if healthy.rows:
                self._run(healthy, logits)
        return logits

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """The rows whose processor broke its contract in the last `apply`, each with its fault."""
        faults, self._faults = sorted(self._faults.items(), key=lambda item: item[0]), {}
        return faults

    def _attach(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> list[_Row] | None:
        rows = []
        for use in self._uses(params):
            view = RequestView(
                rid=use.rid,
                prompt_token_ids=prompt_token_ids or [],
                output_token_ids=output_token_ids,
                sampling_params=params,
                eos_token_ids=self._model.eos_token_ids,
                vocab_size=self._model.vocab_size,
                tokenizer=self._model.tokenizer,
            )
            # Deep: processors keep state in their parameters, and a request's `n` continuations share what it sent.
            params_copy = copy.deepcopy(use.params) | {"__req__": view}
            rows.append(_Row(use, OutputFollower(view, output_token_ids), params_copy))
        return rows or None

    def _grouped(self) -> list[_Group]:
        groups: dict[tuple[int, str, int | None], _Group] = {}
        for row, members in sorted(self._rows.items()):
            for stage, member in enumerate(members):
                processor = member.use.processor
                key = (stage, processor.digest, row if processor.per_sequence else None)
                group = groups.setdefault(key, _Group(stage, processor))
                group.rows.append(row)
                group.members.append(member)
        return sorted(groups.values(), key=lambda group: group.stage)

    def _without_faulty_rows(self, group: _Group) -> _Group:
        kept = [(row, member) for row, member in zip(group.rows, group.members, strict=True) if row not in self._faults]
        return _Group(group.stage, group.processor, [row for row, _ in kept], [member for _, member in kept])

    def _run(self, group: _Group, logits: torch.Tensor) -> None:
        # Detached: a processor that writes values with a gradient must not tie all the logits to it.
        rows = logits[group.rows[0] : group.rows[-1] + 1].detach() if group.adjacent else logits[group.rows]
        began = time.perf_counter()
        try:
            result = group.processor.host.run(group.processor, rows, [member.params for member in group.members])
        except ProcessorFault as fault:
            # The call is one for all rows, so that nobody can say which of them was the reason: all of them end.
            self._faults |= dict.fromkeys(group.rows, fault)
            logits[group.rows] = 0.0
            return
        share = (time.perf_counter() - began) / len(group.rows)
        for member in group.members:
            member.use.steps += 1
            member.use.seconds += share
        self._write_back(group, rows, result, logits)

    def _write_back(self, group: _Group, rows: torch.Tensor, result: torch.Tensor, logits: torch.Tensor) -> None:
        # One reduction finds all three faults: NaN wins every comparison, +inf is the largest, and -inf is the largest
        # only where nothing else is left.
        finite = torch.isfinite(result.amax(dim=-1)).tolist()
        if not group.adjacent:
            logits[group.rows] = result
        elif result is not rows:
            rows.copy_(result)
        if all(finite):
            return
        for row, is_finite in zip(group.rows, finite, strict=True):
            if not is_finite:
                self._faults[row] = non_finite_fault(
                    logits[row], name=group.processor.name, digest=group.processor.digest
                )
                logits[row] = 0.0
