from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.allowed_tokens import AllowedTokens, mask_of
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.executor import CollectEdits, LoadedProcessor, RunOutcome
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

VOCAB = 8
Load = Callable[..., LoadedProcessor]
Shipping = Callable[..., Any]
NewShipped = Callable[[], ShippedProcessors]
Params = dict[str, Any]


@pytest.fixture
def new_shipped() -> NewShipped:
    def make() -> ShippedProcessors:
        return ShippedProcessors(None, torch.device("cpu"), False, model=ModelView(VOCAB, frozenset({1}), "tokenizer"))

    return make


class Batch:
    """A persistent batch with its `ShippedProcessors`."""

    def __init__(self, shipped: ShippedProcessors, *requests: Any, max_num_seqs: int = 16) -> None:
        self.rows: PersistentBatch[Any] = PersistentBatch(max_num_seqs)
        self.shipped = shipped
        for request in requests:
            self.rows.add(request)

    def step(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, ProcessorFault]]:
        self.shipped.update_state(self.rows.commit())
        result = self.shipped.apply(logits)
        return result, dict(self.shipped.take_faults())


def add_by(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    """Adds each row's own value, in place."""
    for row, param in zip(logits, params, strict=True):
        row += param["by"]
    return logits


def doubled(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    return logits * 2


def in_float64(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    return logits.double() + torch.tensor([[param["by"]] for param in params], dtype=torch.float64)


def shifted_by_history(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    """Edit rows depending on their whole history and on the number of earlier calls."""
    rows = []
    for row, param in zip(logits, params, strict=True):
        request = param["__req__"]
        request.state["calls"] = request.state.get("calls", 0) + 1
        history = sum(request.origin_input_ids) + 3 * sum(request.output_ids)
        rows.append(row.roll(history + request.state["calls"]))
    return torch.stack(rows)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_rows_without_processor_are_unchanged(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    add = load(add_by, "Add")
    batch = Batch(new_shipped(), shipping("a"), shipping("b", (add, {"by": 1.0})), shipping("c"))
    logits = logits_of(3)
    expected = logits.clone()
    expected[1] += 1.0
    result, faults = batch.step(logits)
    assert result is logits
    assert faults == {}
    assert torch.equal(result, expected)


@pytest.mark.parametrize("call", [add_by, in_float64, doubled])
@pytest.mark.parametrize("attached_rows", [[0, 1, 2], [2, 3], [0, 2, 4], [1, 4], [3]])
def test_group_sees_only_its_rows(
    call: Any, attached_rows: list[int], new_shipped: NewShipped, shipping: Shipping, load: Load
) -> None:
    seen: list[tuple[torch.Tensor, list[str]]] = []

    def watched(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        seen.append((logits.clone(), [param["__req__"].rid for param in params]))
        assert logits.is_contiguous()
        result: torch.Tensor = call(logits, params)
        return result

    processor = load(watched, "Watched")
    uses = [((processor, {"by": float(row)}),) if row in attached_rows else () for row in range(5)]
    batch = Batch(new_shipped(), *(shipping(f"r{row}", *use) for row, use in enumerate(uses)))
    logits = logits_of(5)
    before = logits.clone()
    result, faults = batch.step(logits)
    assert faults == {}
    assert len(seen) == 1
    assert torch.equal(seen[0][0], before[attached_rows])
    assert seen[0][1] == [f"r{row}" for row in attached_rows]
    expected = before.clone()
    for row in attached_rows:
        expected[row] = before[row] * 2 if call is doubled else before[row] + float(row)
    torch.testing.assert_close(result, expected)


def test_adjacent_group_gets_a_view_of_the_logits(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    seen: list[int] = []

    def watched(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        seen.append(logits.data_ptr())
        return logits

    use = (load(watched, "Watched"), {})
    batch = Batch(new_shipped(), shipping("a"), shipping("b", use), shipping("c", use))
    logits = logits_of(3)
    batch.step(logits)
    assert seen == [logits[1].data_ptr()]


def test_processors_run_in_list_order(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    add, double = load(add_by, "Add"), load(doubled, "Double")
    batch = Batch(
        new_shipped(),
        shipping("a", (add, {"by": 1.0}), (double, {})),
        shipping("b", (double, {}), (add, {"by": 1.0})),
        shipping("c", (add, {"by": 1.0}), (add, {"by": 10.0}), (double, {})),
    )
    result, _ = batch.step(torch.ones(3, VOCAB))
    assert result[:, 0].tolist() == [4.0, 3.0, 24.0]


def test_same_class_twice_is_two_uses(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    """Each use has its own parameters, state and receipt."""
    states: list[Any] = []

    def watched(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        states.extend(param["__req__"].state for param in params)
        return add_by(logits, params)

    processor = load(watched, "Watched")
    request = shipping("a", (processor, {"by": 1.0}), (processor, {"by": 10.0}))
    result, _ = Batch(new_shipped(), request).step(torch.zeros(1, VOCAB))
    assert result[0, 0] == 11.0
    assert states[0] is not states[1]
    assert [use.receipt.steps for use in request.sampling_params.processors] == [1, 1]


def test_contents_of_the_request_view(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    seen: list[Params] = []

    def watched(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        seen.extend(params)
        return logits

    request = shipping("r1", (load(watched, "Watched"), {"by": 2}), prompt=[4, 5])
    Batch(new_shipped(), request).step(torch.zeros(1, VOCAB))
    (params,) = seen
    view = params.pop("__req__")
    assert params == {"by": 2}
    assert (view.rid, view.origin_input_ids, view.output_ids) == ("r1", [4, 5], [])
    assert (view.vocab_size, view.eos_token_ids, view.tokenizer) == (VOCAB, {1}, "tokenizer")
    assert view.sampling_params == request.sampling_params


@pytest.mark.parametrize("edit", ["view.output_ids = None", "del view.output_ids", "del view.state", "params.clear()"])
def test_broken_view_affects_no_other_row(edit: str, new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    def spoil(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        if "__req__" in params[0] and params[0]["__req__"].rid == "spoilt":
            exec(edit, {"view": params[0]["__req__"], "params": params[0]})
        return logits + 1

    spoilt = shipping("spoilt", (load(spoil, "Spoil"), {}))
    batch = Batch(new_shipped(), spoilt, shipping("healthy", (load(spoil, "Healthy"), {})))
    for _ in range(3):
        logits, _faults = batch.step(torch.zeros(2, VOCAB))
        assert logits[1].tolist() == [1.0] * VOCAB


def test_edited_params_are_per_sequence(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    """Two continuations share the request's parameters, in which a processor may keep state."""

    def take_one(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        for row, param in zip(logits, params, strict=True):
            row += param["queue"].pop(0)
        return logits

    sent = {"queue": [1.0, 2.0]}
    use = (load(take_one, "TakeOne"), sent)
    batch = Batch(new_shipped(), shipping("a", use), shipping("a", use))
    assert batch.step(torch.zeros(2, 1))[0].tolist() == [[1.0], [1.0]]
    assert batch.step(torch.zeros(2, 1))[0].tolist() == [[2.0], [2.0]]
    assert sent == {"queue": [1.0, 2.0]}


def raising(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    logits.fill_(float("nan"))
    raise ValueError("broken")


def misshapen(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    return logits[:, 1:]


@pytest.mark.parametrize(("call", "kind"), [(raising, "exception"), (misshapen, "bad_result")])
@pytest.mark.parametrize("faulty", [[1, 2], [0, 3]])
def test_failing_group_ends_alone(
    call: Any, kind: str, faulty: list[int], new_shipped: NewShipped, shipping: Shipping, load: Load
) -> None:
    healthy, broken = load(add_by, "Add"), load(call, "Broken")
    rows = [
        shipping(f"r{row}", (broken, {}), (healthy, {"by": 1.0}))
        if row in faulty
        else shipping(f"r{row}", (healthy, {"by": 2.0}), (healthy, {"by": 3.0}))
        for row in range(5)
    ]
    without = [shipping(f"r{row}") if row in faulty else request for row, request in enumerate(rows)]
    logits = logits_of(5)
    result, faults = Batch(new_shipped(), *rows).step(logits.clone())
    expected, no_faults = Batch(new_shipped(), *without).step(logits.clone())
    assert no_faults == {}
    assert sorted(faults) == faulty
    assert {fault.kind for fault in faults.values()} == {kind}
    assert {fault.name for fault in faults.values()} == {"Broken"}
    others = [row for row in range(5) if row not in faulty]
    assert torch.equal(result[others], expected[others])
    assert result[faulty].eq(0).all()


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ([float("nan")], "returned NaN"),
        ([float("inf")], "returned +inf (to force a token, forbid all others)"),
        ([float("inf"), float("nan")], "returned NaN"),
        ([float("-inf")] * VOCAB, "left no token: every logit of the row is -inf"),
    ],
)
def test_non_finite_row_ends_alone(
    bad: list[float],
    found: str,
    in_place: bool,
    adjacent: bool,
    new_shipped: NewShipped,
    shipping: Shipping,
    load: Load,
) -> None:
    def spoil(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        logits = logits if in_place else logits + 0.0
        for row, param in zip(logits, params, strict=True):
            if param["spoil"]:
                row[: len(bad)] = torch.tensor(bad)
            else:
                row[0] = float("-inf")
        return logits

    stage_1_saw: list[str] = []

    def note(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        stage_1_saw.extend(param["__req__"].rid for param in params)
        return logits

    processor, second = load(spoil, "Spoil"), load(note, "Note")
    requests = [shipping(f"r{row}", (processor, {"spoil": row == 1}), (second, {})) for row in range(3)]
    if not adjacent:
        requests.insert(1, shipping("other"))
    bad_row = 1 if adjacent else 2
    logits = logits_of(len(requests))
    before = logits.clone()
    result, faults = Batch(new_shipped(), *requests).step(logits)
    assert list(faults) == [bad_row]
    assert faults[bad_row].kind == "non_finite"
    assert faults[bad_row].message == f"processor Spoil {found}"
    # Later processors do not get a row that failed.
    assert stage_1_saw == ["r0", "r2"]
    assert result[bad_row].eq(0).all()
    others = [row for row in range(len(requests)) if row != bad_row]
    assert torch.equal(result[others, 1:], before[others, 1:])


def test_float64_overflow_is_not_finite(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    request = shipping("a", (load(lambda logits, params: logits.double() + 1e300, "Huge"), {}))
    _, faults = Batch(new_shipped(), request).step(torch.zeros(1, VOCAB))
    assert faults[0].kind == "non_finite"


def test_negative_infinity_is_allowed(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    def only_token_3(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        forced = torch.full_like(logits, float("-inf"))
        forced[:, 3] = 0.0
        return forced

    result, faults = Batch(new_shipped(), shipping("a", (load(only_token_3, "Only3"), {}))).step(logits_of(1))
    assert faults == {}
    assert result.argmax().item() == 3


def test_faults_are_per_step(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    failing = [True]

    def sometimes(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        if failing:
            raise ValueError(failing.pop())
        return logits + 1

    shipped = new_shipped()
    batch = Batch(shipped, shipping("a", (load(sometimes, "Sometimes"), {})))
    shipped.update_state(batch.rows.commit())
    shipped.apply(torch.zeros(1, VOCAB))
    # The faults were not taken, because the step failed elsewhere. The row runs again nevertheless.
    result, faults = batch.step(torch.zeros(1, VOCAB))
    assert faults == {}
    assert result.eq(1).all()
    assert shipped.take_faults() == []


def test_gradients_are_dropped(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    weight = torch.nn.Parameter(torch.ones(VOCAB))

    def steer(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        return logits.add_(weight)

    batch = Batch(new_shipped(), shipping("a", (load(steer, "Steer"), {})), shipping("b"))
    result, _ = batch.step(torch.zeros(2, VOCAB))
    assert not result.requires_grad
    assert result[:, 0].tolist() == [1.0, 0.0]


def test_receipts_count_applied_steps(new_shipped: NewShipped, shipping: Shipping, load: Load) -> None:
    add = load(add_by, "Add")
    first, second = shipping("a", (add, {"by": 1.0})), shipping("b", (add, {"by": 1.0}))
    batch = Batch(new_shipped(), first)
    batch.step(torch.zeros(1, VOCAB))
    batch.rows.add(second)
    for _ in range(3):
        batch.step(torch.zeros(2, VOCAB))
    receipts = [request.sampling_params.processors[0].receipt for request in (first, second)]
    assert [receipt.steps for receipt in receipts] == [4, 3]
    assert [(receipt.digest, receipt.name) for receipt in receipts] == [(add.digest, "Add")] * 2
    assert receipts[0].milliseconds >= receipts[1].milliseconds > 0


def test_custom_lookup_of_uses(load: Load) -> None:
    """An engine whose sampling params have no field for processors can pass its own lookup."""
    use = ProcessorUse(load(add_by, "Add"), {"by": 1.0}, "r")
    shipped = ShippedProcessors(
        None, torch.device("cpu"), False, model=ModelView(VOCAB, frozenset(), None), uses=lambda params: [use]
    )
    shipped.update_state(BatchUpdate(1, [], [(0, SamplingParams(), None, [])], []))
    assert shipped.apply(torch.zeros(1, VOCAB)).eq(1).all()
    assert not shipped.is_argmax_invariant()


def test_preempted_sequence_keeps_its_state(load: Load) -> None:
    """It is removed from its row, added to another one later, and closed when it is no longer kept."""
    calls: list[int] = []

    def counted(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        state = params[0]["__req__"].state
        state["calls"] = state.get("calls", 0) + 1
        calls.append(state["calls"])
        return logits

    use = ProcessorUse(load(counted, "Counted"), {}, "rid")
    kept = {use}
    model = ModelView(VOCAB, frozenset({1}), None)
    shipped = ShippedProcessors(None, torch.device("cpu"), False, model=model, is_kept=kept.__contains__)
    params = SamplingParams(processors=(use,))
    for row in (0, 2):
        shipped.update_state(BatchUpdate(row + 1, [], [(row, params, [5], [])], []))
        shipped.apply(logits_of(row + 1))
        shipped.update_state(BatchUpdate(0, [row], [], []))
        shipped.apply(logits_of(0))
    assert calls == [1, 2]
    kept.clear()
    shipped.close_absent()
    shipped.update_state(BatchUpdate(1, [], [(0, params, [5], [])], []))
    shipped.apply(logits_of(1))
    assert calls == [1, 2, 1]


def test_empty_batch(new_shipped: NewShipped) -> None:
    result, faults = Batch(new_shipped()).step(torch.zeros(0, VOCAB))
    assert (list(result.shape), faults) == ([0, VOCAB], {})


class Reference:
    """One request processed by itself, without groups and batch."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.calls = 0

    def apply(self, row: torch.Tensor) -> torch.Tensor | None:
        """Return the row's logits after its processors, or None if one of them fails."""
        self.calls += 1
        request = self.request
        for use in request.sampling_params.processors:
            match use.processor.name:
                case "Add" | "In64":
                    row = (row.double() + use.params["by"]).float()
                case "Double":
                    row = row * 2
                case "History":
                    history = sum(request.prompt_token_ids) + 3 * sum(request.output_token_ids)
                    row = row.roll(history + self.calls)
                case "FailsAt":
                    if self.calls == use.params["step"]:
                        return None
        return row


def fails_at(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
    for row, param in zip(logits, params, strict=True):
        state = param["__req__"].state
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] == param["step"]:
            row[2] = float("nan")
    return logits


@random_seeds(25, shares_fixtures=True)
def test_random_schedules_match_each_request_alone(
    seed: int, new_shipped: NewShipped, shipping: Shipping, load: Load
) -> None:
    rng = random.Random(seed)
    calls = {"Add": add_by, "In64": in_float64, "Double": doubled, "History": shifted_by_history, "FailsAt": fails_at}
    processors = {name: load(call, name) for name, call in calls.items()}
    capacity = rng.choice([1, 3, 8])
    batch = Batch(new_shipped(), max_num_seqs=capacity)
    alone: dict[Any, Reference] = {}
    for step in range(60):
        for request in rng.sample(list(alone), rng.randint(0, min(2, len(alone)))):
            batch.rows.remove(request)
            del alone[request]
        for number in range(rng.randint(0, min(3, capacity - len(alone)))):
            # "History" at most once: its state counts one call per step.
            names = rng.sample(sorted(calls), rng.choice([0, 1, 1, 2, 3]))
            uses = [(processors[name], {"by": rng.uniform(-3, 3), "step": rng.randint(1, 9)}) for name in names]
            request = shipping(f"{step}.{number}", *uses, prompt=[rng.randrange(VOCAB) for _ in range(3)])
            batch.rows.add(request)
            alone[request] = Reference(request)
        batch.rows.condense()
        if len(alone) > 1 and rng.random() < 0.4:
            batch.rows.swap(*rng.sample(range(len(alone)), 2))

        logits = logits_of(len(alone), seed=1000 * seed + step)
        expected = [alone[request].apply(logits[row]) for row, request in enumerate(batch.rows.members)]
        result, faults = batch.step(logits.clone())
        assert sorted(faults) == [row for row, values in enumerate(expected) if values is None]
        for row, values in enumerate(expected):
            if values is not None:
                torch.testing.assert_close(result[row], values)
        for row, request in enumerate(batch.rows.members):
            request.output_token_ids.append(rng.randrange(VOCAB))
            for use in request.sampling_params.processors:
                assert row in faults or use.receipt.steps == alone[request].calls
        for row, request in enumerate(list(batch.rows.members)):
            if row in faults:
                batch.rows.remove(request)
                del alone[request]


def only(*token_ids: int) -> Any:
    """Return a mask that allows only these tokens."""

    def mask(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[list(token_ids)] = False
        return logits.masked_fill_(forbidden, float("-inf"))

    return mask


def forcing(token_id: int) -> Any:
    def force(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        logits.fill_(float("-inf"))
        logits[:, token_id] = 0.0
        return logits

    return force


@pytest.fixture
def load_mask(load: Load) -> Load:
    """Load a trusted processor: a mask, or with `is_mask=False` another one."""

    def loaded(call: Any, name: str, is_mask: bool = True) -> LoadedProcessor:
        return replace(load(call, name), is_mask=is_mask, is_trusted=True)

    return loaded


def left(row: torch.Tensor) -> list[int]:
    return row.isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("first", [True, False])
def test_masks_run_before_and_after_other_processors(
    first: bool, new_shipped: NewShipped, shipping: Shipping, load: Load, load_mask: Load
) -> None:
    seen: list[list[int]] = []

    def raise_all(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        seen.append(left(logits[0]))
        return torch.ones_like(logits)

    mask, other = (load_mask(only(2, 5), "Mask"), {}), (load(raise_all, "Raise"), {})
    request = shipping("a", *((mask, other) if first else (other, mask)))
    batch = Batch(new_shipped(), request, shipping("b", mask), shipping("c"))
    result, faults = batch.step(logits_of(3))
    assert faults == {}
    assert seen == [[2, 5]]
    assert [left(row) for row in result] == [[2, 5], [2, 5], list(range(VOCAB))]
    # A step counts once, even if a mask runs twice in it.
    uses = request.sampling_params.processors
    assert {use.processor.name: use.count.steps for use in uses} == {"Mask": 1, "Raise": 1}


def test_masks_intersect(new_shipped: NewShipped, shipping: Shipping, load_mask: Load) -> None:
    one, two = load_mask(only(1, 2, 3), "One"), load_mask(only(2, 3, 4), "Two")
    result, _ = Batch(new_shipped(), shipping("a", (one, {}), (two, {})), shipping("b", (two, {}))).step(logits_of(2))
    assert [left(row) for row in result] == [[2, 3], [2, 3, 4]]


def test_trusted_processors_are_checked_by_the_sampler(
    new_shipped: NewShipped, shipping: Shipping, load_mask: Load
) -> None:
    mask, force = load_mask(only(1), "Mask"), load_mask(forcing(2), "Force", False)
    result, faults = Batch(new_shipped(), shipping("a", (force, {}), (mask, {}))).step(logits_of(1))
    assert faults == {}
    assert left(result[0]) == []


def test_shipped_processor_forbids_all_tokens_left_by_masks(
    new_shipped: NewShipped, shipping: Shipping, load: Load, load_mask: Load
) -> None:
    ban = load(only(*range(1, VOCAB)), "Ban")
    request = shipping("a", (ban, {}), (load_mask(only(0), "Mask"), {}))
    request.sampling_params = replace(request.sampling_params, allowed_token_ids=[0], min_tokens=2)
    batch = Batch(new_shipped(), request, shipping("b", (ban, {})))
    result, faults = batch.step(logits_of(2))
    assert list(faults) == [0]
    assert faults[0].message == (
        "processor Ban left no token of those that allowed_token_ids, min_tokens, Mask had left: every logit of the "
        "row is -inf"
    )
    assert left(result[1]) == list(range(1, VOCAB))


def test_observer_gets_each_call_with_its_rows(load: Load, shipping: Shipping) -> None:
    calls: list[tuple[str, int]] = []

    def on_call(processor: LoadedProcessor) -> Callable[[int, float], None]:
        def observe(num_rows: int, seconds: float, logits_use: str) -> None:
            assert seconds > 0
            calls.append((processor.name, num_rows))

        return observe

    def failing(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        raise ValueError("no")

    add, bad = load(add_by, "Add"), load(failing, "Bad")
    model = ModelView(VOCAB, frozenset({1}), None)
    shipped = ShippedProcessors(None, torch.device("cpu"), False, model=model, on_call=on_call)
    uses = [[(add, {"by": 1.0})], [(add, {"by": 2.0})], [(bad, {})], []]
    batch = Batch(shipped, *(shipping(f"r{row}", *of_row) for row, of_row in enumerate(uses)))
    batch.step(logits_of(4))
    assert sorted(calls) == [("Add", 2), ("Bad", 1)]


@pytest.mark.parametrize(
    ("bad", "found"),
    [(float("nan"), "returned NaN"), (float("-inf"), "left no token: every logit of the row is -inf")],
)
def test_unchecked_row_is_attributed_by_fault_of(
    bad: float, found: str, shipping: Shipping, load: Load, load_mask: Load
) -> None:
    """Only rows that no later processor gets are left for the caller to check."""

    def spoil(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        return logits.fill_(bad)

    model = ModelView(VOCAB, frozenset({1}), None)
    shipped = ShippedProcessors(None, torch.device("cpu"), False, model=model, check_last=False)
    alone, first = (load(spoil, "Alone"), {}), (load(spoil, "First"), {})
    masked, limited = (load(spoil, "Masked"), {}), shipping("limited", (load(spoil, "Limited"), {}))
    limited.sampling_params = replace(limited.sampling_params, allowed_token_ids=[1])
    trusted = (replace(load(spoil, "Trusted"), is_trusted=True), {})
    requests = [
        shipping("alone", alone),
        shipping("first", first, (load(add_by, "Add"), {"by": 1.0})),
        shipping("masked", masked, (load_mask(only(2), "Mask"), {})),
        limited,
        shipping("trusted", trusted),
        shipping("none"),
    ]
    logits, faults = Batch(shipped, *requests).step(logits_of(len(requests)))
    assert {row: fault.name for row, fault in faults.items()} == {1: "First", 2: "Masked", 3: "Limited"}
    fault = shipped.fault_of(0, logits[0])
    assert fault is not None
    assert (fault.name, fault.kind, fault.message) == ("Alone", "non_finite", f"processor Alone {found}")
    assert [shipped.fault_of(row, logits[row]) for row in range(2, 6)] == [None] * 4


class ChargingExecutor:
    """Runs nothing. Each call takes a number of seconds of the step's deadline.

    Attributes:
        spent: the seconds that had been used when each call began.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.spent: list[float] = []

    def attach(self, *_: Any) -> Any:
        return SimpleNamespace(close=lambda: None)

    def group(self, *_: Any) -> ChargingExecutor:
        return self

    def begin(self, logits: torch.Tensor, seconds_used: float = 0.0) -> ChargingExecutor:
        self.spent.append(seconds_used)
        return self

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        return RunOutcome(self._seconds, charged=self._seconds)


def test_stages_of_a_tenant_share_the_deadline_of_a_step(new_shipped: NewShipped, shipping: Shipping) -> None:
    slow, quick, last, other = executors = [ChargingExecutor(seconds) for seconds in (0.5, 0.25, 0.125, 4.0)]

    def processor(executor: Any, tenant: str) -> LoadedProcessor:
        return LoadedProcessor(f"sha256:{id(executor)}", "P", executor, None, tenant=tenant)

    batch = Batch(
        new_shipped(),
        shipping("a", (processor(slow, "one"), {}), (processor(quick, "one"), {}), (processor(last, "one"), {})),
        shipping("b", (processor(quick, "one"), {})),
        shipping("c", (processor(other, "two"), {}), (processor(other, "two"), {})),
    )
    batch.step(logits_of(3))
    # The calls of a stage overlap: the slowest counts.
    assert [each.spent for each in executors] == [[0.0], [0.0, 0.5], [0.75], [0.0, 4.0]]
    # A verified draft belongs to the same step.
    batch.shipped.apply_with_spec_decode(logits_of(1), [1, 0, 0])
    assert slow.spent == [0.0, 0.875]
    batch.step(logits_of(3))
    assert slow.spent == [0.0, 0.875, 0.0]


class OneCallExecutor:
    """Has one process: of two calls at a time, the second ends the first. Calls need their logits.

    Attributes:
        rows: number of rows of each call.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._current: OneCallExecutor.Call | None = None

    class Call:
        def __init__(self, executor: OneCallExecutor, num_rows: int) -> None:
            assert executor._current is None, "the call before has not ended"
            executor._current = self
            executor.rows.append(num_rows)
            self._executor = executor

        def needs_logits(self) -> bool:
            return True

        def provide(self, logits: torch.Tensor) -> None:
            pass

        def wait(self, timeout: float) -> bool:
            return True

        def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
            assert self._executor._current is self
            self._executor._current = None
            return RunOutcome(0.0)

    def attach(self, *_: Any) -> Any:
        return SimpleNamespace(close=lambda: None)

    def group(self, processor: LoadedProcessor, rows: Sequence[Any]) -> Any:
        return SimpleNamespace(
            promise=lambda: self.Call(self, len(rows)), begin=lambda logits, seconds_used: self.Call(self, len(logits))
        )


def test_rows_without_an_early_call_wait_for_that_of_others(new_shipped: NewShipped, shipping: Shipping) -> None:
    """On a busy machine, a call for the token after a certain one may not have ended when its logits exist."""
    executor = OneCallExecutor()
    processor = LoadedProcessor("sha256:1", "P", executor, None)  # type: ignore[arg-type]
    batch = Batch(new_shipped(), shipping("a", (processor, {})), shipping("b", (processor, {})))
    shipped = batch.shipped
    shipped.update_state(batch.rows.commit())
    ((group,),) = (stage.groups for stage in shipped._stages)
    ahead = group.select({0: 0})
    assert ahead is not None
    early = shipped._early
    early._begin(ahead)
    early._allowed[next(iter(early._calls))] = AllowedTokens(VOCAB)
    shipped.apply(logits_of(2))
    assert executor.rows == [1]
    assert shipped.take_deferred() == [1]
    shipped.apply(logits_of(2))
    assert executor.rows == [1, 2]
    assert shipped.take_deferred() == []


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_call_ahead_begins_beside_a_deferred_one(new_shipped: NewShipped, shipping: Shipping, is_busy: bool) -> None:
    executor = OneCallExecutor()
    processor = LoadedProcessor("sha256:1", "P", executor, None)  # type: ignore[arg-type]
    request = shipping("a", (processor, {}))
    batch = Batch(new_shipped(), request)
    shipped = batch.shipped
    shipped.update_state(batch.rows.commit())
    shipped.begin()
    early = shipped._early
    ((key, call),) = early._calls.items()
    early._open.remove(call)
    call.finish()
    only_token_5 = AllowedTokens(VOCAB)
    only_token_5.keep_mask(mask_of([5], VOCAB))
    early._allowed[key] = only_token_5
    request.output_token_ids.append(5)
    if is_busy:
        shipped._calls._busy.add(processor.group_name)
    shipped.restrict({0: AllowedTokens(VOCAB)})
    assert executor.rows == ([1] if is_busy else [1, 1])
