"""logits-processor-zoo's own classes as batch processors, compared with the recording `tests/data/zoo.json`.

Each recorded script is a request, and each of its rows a sequence. Sequences are added to and removed from one batch at
random steps, so that their rows change while they run.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.adapter import AdapterLogitsProcessor, RequestLogitsProcessor
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.clock import Clock
from tests.helpers.random_cases import random_seeds
from tests.helpers.zoo import (
    RECORDING,
    SCRIPTS,
    VARIANTS,
    Script,
    add_prefix_space,
    as_logits,
    params_of,
    processors_of,
    recorded_tokenizers,
    set_clock,
)

# (name, variant) to the reason.
LEFT_OUT = {
    ("batch_bigger_than_declared_raises", "transformers"): (
        "one object for two rows: here each sequence has its own, for which a batch_size of 1 is enough"
    ),
    ("batch_shared_clock", "transformers"): (
        "QUIRK: one clock for two rows, so that one sequence's phrase puts off the other's; here each has its own clock"
    ),
    ("repeated_identical_call_is_a_new_generation", "transformers"): (
        "QUIRK: two calls with the same tokens; in a batch each step of a sequence has a new token"
    ),
}


@dataclass
class Call:
    """One recorded call for one row."""

    output_ids: list[int]
    logits: torch.Tensor
    clock: float
    expected: torch.Tensor | None
    """None if the original raised."""
    raises: str
    """The original's exception: `Type: message`."""


@dataclass(eq=False)
class Sequence:
    """One row of one script, from its prompt to its last call."""

    script: Script
    row: int
    prompt_token_ids: list[int]
    calls: list[Call] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(extra_args={"sequence": self})

    @property
    def call(self) -> Call:
        return self.calls[self.done]

    def advance(self) -> bool:
        """Append the tokens of the next call; return False if there is none."""
        self.done += 1
        if self.done == len(self.calls):
            return False
        assert self.call.output_ids[: len(self.output_token_ids)] == self.output_token_ids
        self.output_token_ids.extend(self.call.output_ids[len(self.output_token_ids) :])
        return True


def sequences_of(script: Script) -> list[Sequence]:
    """Return the sequences of a script. A new prompt within it is a new request: an object serves only one."""
    sequences = []
    for row in range(len(script["prompt_ids"])):
        prompt: list[int] | None = None
        for step in script["steps"]:
            its_prompt = step.get("prompt_ids", script["prompt_ids"])[row]
            if its_prompt != prompt:
                prompt = its_prompt
                sequences.append(Sequence(script, row, list(prompt)))
            sequences[-1].calls.append(call_of(step, row))
    return sequences


def call_of(step: dict[str, Any], row: int) -> Call:
    raises = step.get("expect_raises")
    return Call(
        step["output_ids"][row],
        as_logits(step["logits_in"][row]),
        step.get("clock", 0.0),  # chains have no clock: none of their processors reads it
        None if raises else as_logits(step["expected_logits"][row]),
        f"{raises['type']}: {raises['message']}" if raises else "",
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return set_clock(monkeypatch)


@pytest.fixture(scope="module")
def tokenizers() -> dict[bool | None, Any]:
    return recorded_tokenizers()


def factory_of(script: Script, stage: int, tokenizers: dict[bool | None, Any]) -> CallableFactory:
    """Return the factory as an operator specifies it: class and arguments, without those that the factory fills in."""
    recorded = processors_of(script)[stage]
    module = importlib.import_module(f"logits_processor_zoo.{script['variant']}")
    cls = getattr(module, recorded["processor"])
    kwargs = params_of(recorded)
    tokenizer = tokenizers[add_prefix_space(script)]
    if script.get("cloned_before_use"):
        return CallableFactory(cls(tokenizer=tokenizer, **kwargs))
    return CallableFactory(cls, kwargs=kwargs, tokenizer=tokenizer)


class ZooAdapter(AdapterLogitsProcessor):
    """Runs the processor at one position of each script's chain, with the script's clock."""

    def __init__(self, stage: int, tokenizers: dict[bool | None, Any], clock: Clock) -> None:
        super().__init__(None, torch.device("cpu"), False)
        self._stage = stage
        self._tokenizers = tokenizers
        self._clock = clock

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        assert params.extra_args is not None
        sequence: Sequence = params.extra_args["sequence"]
        if self._stage >= len(processors_of(sequence.script)):
            return None
        self._clock.now = sequence.script.get("clock_at_construction", 0.0)
        processor: Any = factory_of(sequence.script, self._stage, self._tokenizers)()

        def of_hugging_face(input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
            self._clock.now = sequence.call.clock
            return processor(input_ids, scores)

        def of_vllm(prompt: list[int], past: list[int], scores: torch.Tensor) -> Any:
            self._clock.now = sequence.call.clock
            return processor(prompt, past, scores)

        return of_hugging_face if sequence.script["variant"] == "transformers" else of_vllm


def replayed() -> list[Script]:
    return [script for script in SCRIPTS if "steps" in script and (script["name"], script["variant"]) not in LEFT_OUT]


def schedule(waiting: list[Sequence], rng: random.Random) -> Iterator[tuple[PersistentBatch[Any], list[Any]]]:
    """Yield a batch at each step with its members by row. After a step each member advances or is removed."""
    batch: PersistentBatch[Any] = PersistentBatch(12)
    ended: list[Sequence] = []
    while waiting or len(batch) > len(ended):
        for sequence in ended:
            batch.remove(sequence)
        while waiting and len(batch) < batch.max_num_seqs and rng.random() < 0.8:
            batch.add(waiting.pop())
        batch.condense()
        if len(batch) > 1 and rng.random() < 0.7:
            batch.swap(*rng.sample(range(len(batch)), 2))
        members = batch.members
        yield batch, members
        ended = [sequence for sequence in members if not sequence.advance()]


@random_seeds(5, shares_fixtures=True)
def test_recording_is_reproduced(seed: int, clock: Clock, tokenizers: dict[bool | None, Any]) -> None:
    rng = random.Random(seed)
    waiting = [sequence for script in replayed() for sequence in sequences_of(script)]
    rng.shuffle(waiting)
    adapters = [ZooAdapter(stage, tokenizers, clock) for stage in range(2)]
    outcomes: Counter[str] = Counter()
    places: dict[Sequence, set[int]] = {}
    for batch, members in schedule(waiting, rng):
        update = batch.commit()
        for adapter in adapters:
            adapter.update_state(update)
        if not members:
            continue
        logits = torch.stack([sequence.call.logits for sequence in members])
        faults: dict[int, ProcessorFault] = {}
        for adapter in adapters:
            logits = adapter.apply(logits)
            faults |= dict(adapter.take_faults())
        for row, sequence in enumerate(members):
            outcomes[check(sequence, logits[row], faults.get(row))] += 1
            places.setdefault(sequence, set()).add(row)
    assert outcomes == {"edited": 314, "raised": 5, "not finite": 1}
    assert sum(len(rows) > 1 for rows in places.values()) > 20


def check(sequence: Sequence, row: torch.Tensor, fault: ProcessorFault | None) -> str:
    """Compare one row with the recording and return the kind of outcome."""
    call, name = sequence.call, (sequence.script["name"], sequence.script["variant"])
    if call.expected is None:
        assert fault is not None, name
        assert fault.kind == "exception"
        assert fault.message.endswith(f"raised {call.raises}")
        return "raised"
    if call.expected.isnan().any():
        assert fault is not None, name
        assert (fault.kind, fault.message) == ("non_finite", "processor ZooAdapter returned NaN")
        return "not finite"
    assert fault is None, (name, fault)
    torch.testing.assert_close(row, call.expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")
    return "edited"


REFUSED = [script for script in SCRIPTS if "expect_construct_raises" in script]


@pytest.mark.parametrize("script", REFUSED, ids=lambda script: f"{script['variant']}-{script['name']}")
def test_constructors_that_raise(script: Script, tokenizers: dict[bool | None, Any]) -> None:
    raised = script["expect_construct_raises"]
    factory = factory_of(script, 0, tokenizers)
    with pytest.raises(ProcessorLoadError) as error:
        factory()
    assert str(error.value).startswith(
        f"{script['processor']} cannot be created: {raised['type']}: {raised['message']}"
    )


def test_whole_recording_is_replayed() -> None:
    assert (len(RECORDING["vectors"]), len(RECORDING["chains"])) == (103, 2)
    assert (len(replayed()), len(REFUSED), len(LEFT_OUT)) == (93, 9, 3)
    names = {(script["name"], script["variant"]) for script in SCRIPTS}
    assert set(LEFT_OUT) <= names
    for variant in VARIANTS:
        zoo = importlib.import_module(f"logits_processor_zoo.{variant}")
        scripts = [script for script in replayed() if script["variant"] == variant]
        assert {part["processor"] for script in scripts for part in processors_of(script)} == set(zoo.__all__)
