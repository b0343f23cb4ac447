"""The processors that came with requests, together one batch processor (contract 3).

`ShippedProcessors` follows the persistent batch, keeps the rows of each processor as a group, and calls each processor
once a step with the rows of its group and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.client.records import Receipt

from .author_code import non_finite_fault
from .batch_rows import BatchRows, rows_of_drafts
from .interface import BatchUpdate, LogitsProcessor
from .processor_host import HostedRow, HostedSequence, LoadedProcessor, Run, RunOutcome
from .request_view import ModelView
from .sampling_params import SamplingParams


@dataclass(eq=False)
class ProcessorUse:
    """One request's use of one processor. Not shared: the counters are this request's.

    Attributes:
        params: the request's parameters for it, `custom_params` in SGLang's words.
        rid: the request id.
        prepared: what an installed processor made of `params` at admission; None for all others.
        steps: decoding steps to which it was applied so far.
        seconds: time spent so far: a call's time divided by its rows.
        hosted: the sequence at the processor's host, from when it gets a row of the batch.
        forked: the same before, of a sequence that goes on from another one's history.
    """

    processor: LoadedProcessor
    params: dict[str, Any]
    rid: str
    prepared: Any = None
    steps: int = 0
    seconds: float = 0.0
    hosted: HostedRow | None = None
    forked: HostedRow | None = None

    def fork(self, output_token_ids: list[int]) -> ProcessorUse:
        """The use by another sequence, which goes on from this one's history: see `HostedRow.fork`.

        This one has a row. The other one gets a row next, or is closed by `drop_fork`.

        Raises:
            ProcessorFault: what the processor keeps of the sequence cannot be copied.
        """
        assert self.hosted is not None
        return replace(self, hosted=None, forked=self.hosted.fork(output_token_ids))

    def drop_fork(self) -> None:
        """Close what `fork` made, if it has not got a row: it never will. Harmless otherwise."""
        if self.forked is not None:
            self.forked.close()
            self.forked = None

    @property
    def receipt(self) -> Receipt:
        """What the response says of it."""
        return Receipt(self.processor.digest, self.processor.name, self.steps, round(self.seconds * 1e3, 3))


@dataclass(frozen=True, eq=False)
class _Row:
    """A use in its place, and the sequence at the processor's host.

    Attributes:
        before: names of what may have forbidden tokens before it: fields of the request, and earlier processors.
    """

    use: ProcessorUse
    hosted: HostedRow
    before: tuple[str, ...]


@dataclass
class _Group:
    """All rows of one processor, at one place in the order in which its requests' processors run.

    Attributes:
        again: it is a mask that ran before the others already.
        rows: row numbers, ascending.
    """

    processor: LoadedProcessor
    again: bool = False
    rows: list[int] = field(default_factory=list)
    members: list[_Row] = field(default_factory=list)

    @property
    def adjacent(self) -> bool:
        """True if the rows follow one another: the group is then a view of the logits."""
        return self.rows[-1] - self.rows[0] + 1 == len(self.rows)

    def without(self, rows: Container[int]) -> _Group:
        """The same without some rows."""
        return self.at({row: row for row in self.rows if row not in rows})

    def at(self, places: Mapping[int, int]) -> _Group:
        """Those of the rows that have a place, by their places."""
        kept = [(places[row], member) for row, member in zip(self.rows, self.members, strict=True) if row in places]
        return _Group(self.processor, self.again, [place for place, _ in kept], [member for _, member in kept])


@dataclass(frozen=True)
class _Begun:
    """A call of a group's processor that was begun.

    Attributes:
        logits: float32 [rows of the group, vocab]: a view of the batch's logits if the group is adjacent.
    """

    group: _Group
    logits: torch.Tensor
    run: Run


def _never(use: ProcessorUse) -> bool:
    return False


class ShippedProcessors(LogitsProcessor):
    """See the module's text.

    Args:
        model: what they may know of the model.
        uses: finds a request's processors in its sampling params.
        is_kept: says of a use whose row went that the sequence will be back, perhaps in another row: it then finds its
            state. That is looked at whenever the batch changes, and by `close_those_gone`.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,
        *,
        model: ModelView,
        uses: Callable[[SamplingParams], Sequence[ProcessorUse]] = attrgetter("processors"),
        is_kept: Callable[[ProcessorUse], bool] = _never,
    ) -> None:
        self._model = model
        self._uses = uses
        self._is_kept = is_kept
        self._rows: BatchRows[list[_Row]] = BatchRows(self._attach)
        self._members: dict[ProcessorUse, _Row] = {}
        self._stages: list[list[_Group]] = []
        self._faults: dict[int, ProcessorFault] = {}

    def is_argmax_invariant(self) -> bool:
        """False: a shipped processor may do anything to its rows."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and the outputs of the rows that have a processor."""
        if batch_update is not None and self._rows.update(batch_update):
            self.close_those_gone()
            self._stages = self._grouped()
        for member in self._members.values():
            member.hosted.sync()

    def close_those_gone(self) -> None:
        """Let go of the sequences that have no row and will not be back."""
        present = {member.use for members in self._rows.values() for member in members}
        for use in [use for use in self._members if use not in present and not self._is_kept(use)]:
            self._members.pop(use).hosted.close()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run every group on its own rows, in place.

        The groups of a stage have no row in common: all are begun before the first is finished, so that those that run
        in processes of their own work at the same time.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            `logits`. The rows of `take_faults()` are zeros: the caller must not use them.
        """
        self._run(self._stages, logits)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """The same for some rows, see `SpeculativeLogitsProcessor`.

        A processor is not called for a draft that was rejected before: nobody's state has to be taken back.
        """
        rows = rows_of_drafts(num_draft_tokens)
        places = {row: place for place, row in enumerate(rows)}
        self._run([[group.at(places) for group in stage] for stage in self._stages], logits)
        self._faults = {rows[place]: fault for place, fault in self._faults.items()}
        return logits

    def _run(self, stages: Iterable[Sequence[_Group]], logits: torch.Tensor) -> None:
        self._faults = {}  # a step that failed elsewhere may have left some
        for stage in stages:
            groups = stage if not self._faults else [group.without(self._faults) for group in stage]
            for begun in [self._begin(group, logits) for group in groups if group.rows]:
                self._finish(begun, logits)

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """The rows whose processor broke its contract in the last `apply`, each with its fault."""
        faults, self._faults = sorted(self._faults.items(), key=lambda item: item[0]), {}
        return faults

    def _attach(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> list[_Row] | None:
        rows: list[_Row] = []
        before = [*params.forbidding_fields]
        for use in in_run_order(self._uses(params)):
            if use not in self._members:
                self._members[use] = _Row(
                    use, self._hosted(use, params, prompt_token_ids, output_token_ids), tuple(before)
                )
            rows.append(self._members[use])
            before.append(use.processor.name)
        return rows or None

    def _hosted(
        self, use: ProcessorUse, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> HostedRow:
        """The sequence at the processor's host: as it was forked, or new."""
        use.hosted, use.forked = use.forked, None
        if use.hosted is None:
            sequence = HostedSequence(
                rid=use.rid,
                params=use.params,
                prompt_token_ids=prompt_token_ids or [],
                output_token_ids=output_token_ids,
                sampling_params=params,
                model=self._model,
                prepared=use.prepared,
            )
            use.hosted = use.processor.host.attach(use.processor, sequence)
        return use.hosted

    def _grouped(self) -> list[list[_Group]]:
        """The groups, stage by stage: what of a request runs first is in stage (False, 0). Stages run in order."""
        stages: defaultdict[tuple[bool, int], dict[tuple[str, int | None], _Group]] = defaultdict(dict)
        for row, members in sorted(self._rows.items()):
            for (again, number), member in _stages(members):
                processor = member.use.processor
                key = (processor.group_name, row if processor.per_sequence else None)
                group = stages[again, number].setdefault(key, _Group(processor, again))
                group.rows.append(row)
                group.members.append(member)
        return [list(groups.values()) for _, groups in sorted(stages.items(), key=lambda item: item[0])]

    def _begin(self, group: _Group, logits: torch.Tensor) -> _Begun:
        # Detached: a processor that writes values with a gradient must not tie all the logits to it.
        rows = logits[group.rows[0] : group.rows[-1] + 1].detach() if group.adjacent else logits[group.rows]
        return _Begun(
            group, rows, group.processor.host.begin(group.processor, rows, [member.hosted for member in group.members])
        )

    def _finish(self, begun: _Begun, logits: torch.Tensor) -> None:
        group = begun.group
        outcome = begun.run.finish()
        share = outcome.seconds / len(group.rows)
        for place, member in enumerate(group.members):
            if place not in outcome.faults:
                member.use.steps += not group.again
                member.use.seconds += share
        if not group.processor.is_trusted or outcome.faults:
            self._check(begun, outcome)
        if not group.adjacent:
            logits[group.rows] = begun.logits

    def _check(self, begun: _Begun, outcome: RunOutcome) -> None:
        """Put zeros into the rows that a processor failed on, or made unusable."""
        group = begun.group
        # One reduction finds all three faults: NaN wins every comparison, +inf is the largest, and -inf is the largest
        # only where nothing else is left.
        finite = torch.isfinite(begun.logits.amax(dim=-1)).tolist()
        for place, (row, is_finite) in enumerate(zip(group.rows, finite, strict=True)):
            fault = outcome.faults.get(place)
            if fault is None and not is_finite:
                fault = non_finite_fault(
                    begun.logits[place],
                    name=group.processor.name,
                    digest=group.processor.digest,
                    before=group.members[place].before,
                )
            if fault is not None:
                self._faults[row] = fault
                begun.logits[place] = 0.0


def in_run_order(uses: Iterable[ProcessorUse]) -> list[ProcessorUse]:
    """A request's processors as they run: masks first. The masks run once more, after the others."""
    return sorted(uses, key=lambda use: not use.processor.is_mask)


def _stages(members: Sequence[_Row]) -> Iterator[tuple[tuple[bool, int], _Row]]:
    """What runs on a row, each with its stage.

    Args:
        members: in run order.
    """
    for number, member in enumerate(members):
        yield (False, number), member
    masks = [member for member in members if member.use.processor.is_mask]
    if len(masks) < len(members):
        for number, member in enumerate(masks):
            yield (True, number), member
