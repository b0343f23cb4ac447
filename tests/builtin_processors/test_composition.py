"""Composition of built-in processors in a batch, through the sampler; and removal of tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors import ThinkingBudgetLogitProcessor
from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.parts.sampling_rule import RandomRowsProcessor
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, SchedulerConfig, VllmConfig
from logitship.sampler.processors.executor import PREPARED_KEY, ExecutorSequence, LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.local_executor import LocalRow
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.row_errors import NoTokenLeftError
from logitship.sampler.sampler import Sampler
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds
from tests.helpers.watermarks import installed_processors

Params = dict[str, Any]
MakeRow = Callable[..., Params]

CPU = torch.device("cpu")
EOS, THINK, END_THINK = 0, 1, 2
TEXTS = ["Ċ", ".", "a", "b", "c", "d", "1", "2", "3", "ab", "bc"]
VOCAB = 3 + len(TEXTS)
NEWLINE, FIRST_TEXT = 3, 3


def small_model() -> ModelView:
    vocab = {text: token for token, text in enumerate(["</s>", "<think>", "</think>", *TEXTS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<think>", "</think>"]
    return ModelView(
        VOCAB,
        frozenset({EOS}),
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", extra_special_tokens=special),
    )


MODEL = small_model()
CONFIG = VllmConfig(
    SchedulerConfig(max_num_seqs=8),
    reasoning_config=ReasoningConfig(
        reasoning_start_str="<think>",
        reasoning_end_str="</think>",
        reasoning_start_token_ids=[THINK],
        reasoning_end_token_ids=[END_THINK],
        natural_reasoning_end_token_ids=[END_THINK],
    ),
)


def random_tree(generator: random.Random) -> Params:
    tree: dict[str, list[int]] = {"5": generator.sample(range(VOCAB), k=5)}
    for _ in range(12):
        path = generator.choice(list(tree))
        tree[f"{path}_{generator.choice(tree[path] or [7])}"] = generator.sample(range(VOCAB), k=generator.randrange(5))
    return {"tree": {"prefix_dict": tree, "start_token_id": 5, "end_token_id": EOS}}


def random_grammar(generator: random.Random) -> Params:
    params = generator.choice(
        [
            {"regex": "(a|b|ab)*c"},
            {"regex": "[a-d.]{2,9}"},
            {"choice": ["abc", "a.b", "bcd", "1"]},
            {"ebnf": 'root ::= "a" root "b" | "c"'},
        ]
    )
    return params | generator.choice([{}, {}, {"after": "</think>"}])


MASKS: dict[str, Callable[[random.Random], Params]] = {
    "disallowed_tokens": lambda g: {"token_ids": g.sample(range(VOCAB), k=g.randrange(VOCAB))},
    "grammar": random_grammar,
    "multi_sequence": lambda g: {"eos_token_ids": g.sample(range(VOCAB), k=g.randrange(1, 4))},
    "no_repeat_ngram": lambda g: {
        "ngram_size": g.randrange(1, 4),
        "window_size": g.randrange(2, 12),
        "whitelist_token_ids": g.sample(range(VOCAB), k=3),
    },
    "tree": random_tree,
}
FORCING: dict[str, Callable[[random.Random], Params]] = {
    "strict_think_mode": lambda g: {
        "max_thinking_tokens": g.randrange(6),
        "end_think_token_ids": g.choice([[END_THINK], [END_THINK, NEWLINE]]),
        "begin_think_token_ids": [THINK],
    },
    "think_mode": lambda g: {"max_thinking_tokens": g.randrange(6), "end_think_tag": "</think>"},
    "thinking_budget": lambda g: {"thinking_budget": g.randrange(4), "newline": g.choice([None, "\n"])},
}
PREFERENCES: dict[str, Callable[[random.Random], Params]] = {
    "cite_from_prompt": lambda g: {"boost_factor": g.uniform(-9, 9), "conditional_boost_factor": g.choice([0, 1e9])},
    "force_last_phrase": lambda g: {"phrase": g.choice(["abc", "1.\n"])},
    "gen_length": lambda g: {"boost_factor": g.choice([-1e9, 0.5, 1e9]), "complete_sentences": g.random() < 0.5},
    "max_time": lambda g: {"max_time": g.choice([0.0, 1e9])},
    "multiple_choice": lambda g: {
        "choices": g.sample(["1", "2", "3", "ab"], k=2),
        "boost_first_words": g.choice([0, 2]),
    },
    "prevent_hallucination": lambda g: {"phrase": "d.", "minp": g.random(), "tolerate": g.randrange(3)},
    "trigger_phrase": lambda g: {
        "phrase": "ab1",
        "trigger_token_phrase": g.choice("abc"),
        "trigger_after": g.random() < 0.5,
    },
}
REGISTRY = installed_processors()
for _name in REGISTRY:
    _processor: Any = REGISTRY.get(_name)
    # Those of one model force tokens that no small vocabulary has; `test_thinking_budget.py` compares them with SGLang.
    if _name not in MASKS | FORCING | PREFERENCES and not issubclass(_processor, ThinkingBudgetLogitProcessor):
        _kind = MASKS if _processor.is_mask else PREFERENCES
        _kind[_name] = lambda generator, example=_processor.example: dict(example)
ALL = MASKS | FORCING | PREFERENCES
SAMPLERS = {"entropy_stop", *(name for name in REGISTRY if issubclass(REGISTRY.get(name), RandomRowsProcessor))}
"""Names of those that may leave few tokens: a request has them last, as a later one may forbid what is left."""
MIN_STEPS, MAX_STEPS = 60, 1000
"""Steps of a random batch: as many as its test needs to see each case several times."""
INSTANCES: dict[str, Any] = {name: REGISTRY.make(name) for name in ALL}


def test_masks_are_listed_as_masks() -> None:
    assert {name for name in ALL if INSTANCES[name].is_mask} == set(MASKS)


@dataclass
class Request:
    """A request as the persistent batch holds it.

    Attributes:
        wanted: names and parameters of its processors.
    """

    wanted: list[tuple[str, Params]]
    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)

    def with_processors(self, loaded: dict[str, LoadedProcessor]) -> Request:
        """Return a copy with other processors of the same names."""
        return make_request(self.wanted, self.sampling_params, self.prompt_token_ids, self.output_token_ids, loaded)


def load() -> dict[str, LoadedProcessor]:
    executor = InProcessExecutor({}, MODEL)
    return {
        name: LoadedProcessor(name, name, executor, REGISTRY.make(name), is_mask=name in MASKS, is_trusted=True)
        for name in ALL
    }


def make_request(
    wanted: list[tuple[str, Params]],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    loaded: dict[str, LoadedProcessor],
) -> Request:
    uses = [
        ProcessorUse(loaded[name], given, "r", loaded[name].instance.prepare(given, MODEL)) for name, given in wanted
    ]
    params = SamplingParams(
        temperature=params.temperature,
        seed=params.seed,
        eos_token_ids=MODEL.eos_token_ids,
        thinking_token_budget=params.thinking_token_budget,
        processors=tuple(uses),
    )
    return Request(wanted, params, list(prompt), list(output))


def random_request(generator: random.Random, loaded: dict[str, LoadedProcessor]) -> Request:
    names = [
        *generator.sample(list(MASKS), k=generator.choice([0, 1, 1, 2, 3])),
        *generator.sample(list(FORCING), k=generator.choice([0, 1])),
        *generator.sample(list(PREFERENCES), k=generator.choice([0, 1, 2, 3])),
    ]
    generator.shuffle(names)
    names.sort(key=lambda name: name in SAMPLERS)
    budget = None if set(names) & set(FORCING) or generator.random() < 0.7 else generator.randrange(3)
    params = SamplingParams(
        temperature=generator.choice([0.0, 1.0]), seed=generator.randrange(1000), thinking_token_budget=budget
    )
    prompt = generator.choices(range(VOCAB), k=generator.randrange(1, 9))
    output = generator.choices(range(VOCAB), k=generator.choice([0, 0, 0, 3]))
    return make_request([(name, ALL[name](generator)) for name in names], params, prompt, output, loaded)


class Batch:
    """The sampler and the processors of an engine, without its model."""

    def __init__(self) -> None:
        self.rows: PersistentBatch[Request] = PersistentBatch(8)
        budget = ThinkingTokenBudgetLogitsProcessor(CONFIG, CPU, False)
        shipped = ShippedProcessors(None, CPU, False, model=MODEL)
        self.sampler = Sampler(VOCAB, CPU, LogitsProcessors([budget]), shipped)

    def step(self, logits: torch.Tensor) -> tuple[list[int], dict[int, Exception]]:
        self.sampler.update_state(self.rows.commit())
        output = self.sampler.sample(logits.clone())
        return output.token_ids, dict(output.faults)


class Alone(Batch):
    """A request alone in a batch, with separate processors."""

    def __init__(self, request: Request, loaded: dict[str, LoadedProcessor]) -> None:
        super().__init__()
        self.request = request.with_processors(loaded)
        self.rows.add(self.request)


def left_by(name: str, params: Params, request: Request, make_row: MakeRow) -> set[int]:
    """Return the tokens that a processor alone allows, with its state recomputed from the history."""
    row = make_row(
        params, request.prompt_token_ids, list(request.output_token_ids), vocab_size=VOCAB, eos_token_ids={EOS}
    )
    row[PREPARED_KEY] = INSTANCES[name].prepare(params, MODEL)
    logits = INSTANCES[name](torch.zeros(1, VOCAB), [row])
    return set(logits[0].isfinite().nonzero()[:, 0].tolist())


def left_by_budget(request: Request) -> set[int]:
    """Return the tokens that `thinking_token_budget` allows."""
    rows: PersistentBatch[Request] = PersistentBatch(1)
    rows.add(request)
    processor = ThinkingTokenBudgetLogitsProcessor(CONFIG, CPU, False)
    processor.update_state(rows.commit())
    return set(processor.apply(torch.zeros(1, VOCAB))[0].isfinite().nonzero()[:, 0].tolist())


@random_seeds(6, shares_fixtures=True)
def test_masks_intersect_and_forcing_respects_them(seed: int, make_row: MakeRow) -> None:
    """Check each row of a random batch in each step.

    - The sampled token is allowed by every mask.
    - A forced token is sampled if the masks allow it.
    - Otherwise the request ends, with an error that names its processors.
    - The token is the same as for the request alone.
    """
    torch.manual_seed(seed)
    generator = random.Random(seed)
    batch, loaded, loaded_alone = Batch(), load(), load()
    alone: dict[int, Alone] = {}
    ended: list[Request] = []
    num_forced = num_ended = 0
    for step in range(MAX_STEPS):
        if step >= MIN_STEPS and num_forced > 5 and num_ended > 5:
            break
        for request in ended:
            batch.rows.remove(request)
            del alone[id(request)]
        while len(batch.rows) < 6:
            request = random_request(generator, loaded)
            batch.rows.add(request)
            alone[id(request)] = Alone(request, loaded_alone)
        ended = []
        batch.rows.condense()
        requests = batch.rows.members
        logits = torch.randn(len(requests), VOCAB) * 3
        tokens, faults = batch.step(logits)
        for row, request in enumerate(requests):
            other = alone[id(request)]
            (token_alone,), faults_alone = other.step(logits[row : row + 1])
            left = set(range(VOCAB))
            for name, params in request.wanted:
                if name in MASKS:
                    left &= left_by(name, params, request, make_row)
            forced = left_by_budget(request)
            for name, params in request.wanted:
                if name in FORCING:
                    forced = left_by(name, params, request, make_row)
            if not left & forced:
                num_ended += 1
                error = faults[row]
                assert isinstance(error, NoTokenLeftError)
                assert str(faults_alone[0]) == str(error)
                assert all(name in str(error) for name, _ in request.wanted)
                ended.append(request)
                continue
            assert row not in faults, (faults[row], request.wanted)
            assert not faults_alone
            assert tokens[row] == token_alone
            assert tokens[row] in left & forced
            num_forced += len(forced) == 1
            request.output_token_ids.append(tokens[row])
            other.request.output_token_ids.append(tokens[row])
            if len(request.output_token_ids) > 14 or (tokens[row] == EOS and generator.random() < 0.5):
                ended.append(request)
    assert num_forced > 5
    assert num_ended > 5


@random_seeds(6)
def test_certain_drafts_are_sampled(seed: int) -> None:
    """A certain draft is sampled whatever the logits are, unless one of another processor's faults ends the request."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    batch, loaded = Batch(), load()
    num_certain = num_likely = 0
    for step in range(MAX_STEPS):
        if step >= MIN_STEPS and num_likely > num_certain > 5:
            break
        while len(batch.rows) < 6:
            batch.rows.add(random_request(generator, loaded))
        batch.rows.condense()
        requests = list(batch.rows.members)
        batch.sampler.update_state(batch.rows.commit())
        drafts = batch.sampler.drafter.draft(range(len(requests)))
        output = batch.sampler.sample(torch.randn(len(requests), VOCAB) * 9)
        faults = dict(output.faults)
        for row, request in enumerate(requests):
            if row in drafts and drafts[row].is_certain:
                assert row not in faults, request.wanted
                assert [output.token_ids[row]] == list(drafts[row].token_ids), request.wanted
                num_certain += 1
            num_likely += row in drafts and output.token_ids[row] == drafts[row].token_ids[0]
            request.output_token_ids.append(output.token_ids[row])
            if row in faults or len(request.output_token_ids) > 14:
                batch.rows.remove(request)
    assert num_certain > 5
    assert num_likely > num_certain


@pytest.mark.parametrize("name", sorted(ALL))
def test_history_decides_what_is_restricted(name: str, make_row: MakeRow) -> None:
    """Before the logits exist, a processor forbids what its call will forbid, and its state stays as it was."""
    generator = random.Random(name)
    processor = INSTANCES[name]
    torch.manual_seed(0)
    for _ in range(60):
        params = ALL[name](generator)
        row = make_row(
            params,
            generator.choices(range(VOCAB), k=3),
            generator.choices(range(VOCAB), k=generator.randrange(9)),
            vocab_size=VOCAB,
            eos_token_ids={EOS},
            tokenizer=MODEL.tokenizer,
        )
        row[PREPARED_KEY] = processor.prepare(params, MODEL)
        undisturbed = processor(torch.zeros(1, VOCAB), [sharing(row, row["__req__"].output_ids, {})])
        allowed = AllowedTokens(VOCAB)
        processor.restrict([row], [allowed])
        assert torch.equal(processor(torch.zeros(1, VOCAB), [row]), undisturbed)
        left = undisturbed[0].isfinite().nonzero()[:, 0].tolist()
        if allowed.single() is not None:
            assert [allowed.single()] == left
        elif name in MASKS | FORCING and not allowed.likely:
            # Not of tokens that are forbidden one by one: no real vocabulary is as small as this one.
            assert len(left) != 1 or name == "disallowed_tokens"


def sharing(row: Params, output: list[int], state: Params) -> Params:
    """Return a row of the same sequence with another output and state."""
    request = copy.copy(row["__req__"])
    request.output_ids, request.state = list(output), state
    return {**row, "__req__": request}


class BudgetOfOneModel(ThinkingBudgetLogitProcessor):
    name = "of_one_model"
    THINKING_START_TOKEN_ID = THINK
    THINKING_END_TOKEN_ID = END_THINK
    NEW_LINE_TOKEN_ID = NEWLINE


@pytest.mark.parametrize("name", [*sorted(ALL), BudgetOfOneModel.name])
def test_removed_tokens_leave_no_trace(name: str, make_row: MakeRow) -> None:
    """A sequence whose tokens are removed and replaced, and that is forked: each step equals a replay from the start.

    What a processor reads besides the history, the logits, is replayed as well: one step for each number of tokens.
    """
    processor: BuiltinProcessor = INSTANCES.get(name) or BudgetOfOneModel()
    new_params = ALL.get(name) or (lambda generator: {"thinking_budget": generator.randrange(4)})
    generator = random.Random(name)
    torch.manual_seed(0)
    for _ in range(25):
        params = new_params(generator)
        prompt = generator.choices(range(VOCAB), k=generator.randrange(1, 9))
        row = make_row(params, prompt, [], vocab_size=VOCAB, eos_token_ids={EOS}, tokenizer=MODEL.tokenizer)
        row[PREPARED_KEY] = processor.prepare(params, MODEL)
        output: list[int] = []
        state: Params = {}
        seen: list[torch.Tensor] = []  # the logits of the step with so many output tokens
        for _ in range(25):
            del seen[len(output) :]
            seen.append(torch.randn(1, VOCAB) * 3)
            got = processor(seen[-1].clone(), [sharing(row, output, state)])
            fresh: Params = {}
            for length, logits in enumerate(seen):
                expected = processor(logits.clone(), [sharing(row, output[:length], fresh)])
            assert torch.equal(got, expected)
            possible = got[0].isfinite().nonzero()[:, 0].tolist() or [EOS]
            token = generator.choice([*possible, *possible, *range(VOCAB)])
            chance = generator.random()
            if chance < 0.2 and len(output) > 1:  # other steps follow, from an earlier one on
                del output[generator.randrange(1, len(output)) :]
            elif chance < 0.3 and output and token != output[-1]:  # the same number of tokens, but another last one
                output[-1] = token
            else:
                output.append(token)
            if chance > 0.8:  # a copy goes another way, and this one on
                fork = copy.deepcopy(state)
                processor(torch.randn(1, VOCAB), [sharing(row, [*output, token, EOS], fork)])
            elif chance > 0.7:  # this one goes on with the copy, and what it was copied from goes another way
                original, state = state, copy.deepcopy(state)
                processor(torch.randn(1, VOCAB), [sharing(row, [*output[:1], token, END_THINK], original)])


def test_last_forcing_processor_wins() -> None:
    loaded = load()
    budget = ("thinking_budget", {"thinking_budget": 0, "newline": None})
    mode = ("think_mode", {"max_thinking_tokens": 1, "end_think_token_ids": [NEWLINE]})
    for wanted, expected in (([budget, mode], NEWLINE), ([mode, budget], END_THINK)):
        batch = Batch()
        batch.rows.add(make_request(wanted, SamplingParams(temperature=0.0), [THINK], [], loaded))
        tokens, faults = batch.step(torch.randn(1, VOCAB))
        assert (tokens, faults) == ([expected], {})


def test_same_processor_twice_in_a_request() -> None:
    """Each has its own parameters and its own state."""
    wanted = [
        ("no_repeat_ngram", {"ngram_size": 1, "window_size": 2, "whitelist_token_ids": [5]}),
        ("no_repeat_ngram", {"ngram_size": 1, "window_size": 2, "whitelist_token_ids": [6]}),
        ("multiple_choice", {"choices": ["1", "2"]}),
        ("multiple_choice", {"choices": ["3", "ab"]}),
        ("trigger_phrase", {"phrase": "ab", "trigger_token_phrase": "3"}),
        ("trigger_phrase", {"phrase": "bc", "trigger_token_phrase": "3"}),
        ("force_last_phrase", {"phrase": "1"}),
        ("force_last_phrase", {"phrase": "2"}),
    ]
    batch, loaded = Batch(), load()
    request = make_request(wanted, SamplingParams(temperature=0.0), [5, 6], [], loaded)
    batch.rows.add(request)
    for _ in range(6):
        tokens, faults = batch.step(torch.zeros(1, VOCAB))
        assert faults == {}
        assert tokens[0] not in (request.prompt_token_ids + request.output_token_ids)[-2:]
        request.output_token_ids += tokens


def test_largest_boosts_leave_finite_logits(make_row: MakeRow) -> None:
    """64 processors, each of which maximizes the range of the logits."""
    prompt = [NEWLINE, *MODEL.tokenizer.encode("1.a\n2.b\n1.c", add_special_tokens=False)]
    for sign in (1, -1):
        kinds: list[tuple[str, Params]] = [
            ("cite_from_prompt", {"boost_factor": sign * 1e9, "conditional_boost_factor": sign * 1e9}),
            ("gen_length", {"boost_factor": -sign * 1e9, "p": 20}),
            ("multiple_choice", {"choices": ["1", "2"], "boost_first_words": sign * 1e9}),
            ("multiple_choice", {"choices": ["1", "3"], "boost_first_words": -sign * 1e9}),
        ]
        logits = torch.randn(1, VOCAB) * 20
        for name, params in kinds[:2] + kinds[2:] * 31:
            row = make_row(params, prompt, [6], vocab_size=VOCAB, eos_token_ids={EOS}, tokenizer=MODEL.tokenizer)
            row[PREPARED_KEY] = INSTANCES[name].prepare(params, MODEL)
            INSTANCES[name](logits, [row])
            assert logits.isfinite().all(), name


class Broken:
    """Anything of a request on which the server fails."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(f"an error of the server: {name}")


@pytest.mark.parametrize("name", ALL)
def test_built_in_that_fails_on_a_row_fails_on_no_other(name: str) -> None:
    """One call serves the requests of all tenants."""
    generator = random.Random(name)
    # Time passes between a call and its repetition.
    params = [{"max_time": 1e9} if name == "max_time" else ALL[name](generator) for _ in range(3)]
    tokens = [generator.choices(range(VOCAB), k=4) for _ in params]
    loaded = load()[name]

    def called(broken: int | None, *places: int) -> tuple[torch.Tensor, dict[int, Any]]:
        rows = [
            loaded.executor.attach(
                loaded,
                ExecutorSequence(
                    rid="r",
                    params=params[place],
                    prompt_token_ids=[5],
                    output_token_ids=tokens[place],
                    sampling_params=SamplingParams(),
                    model=MODEL,
                    prepared=loaded.instance.prepare(params[place], MODEL),
                ),
            )
            for place in places
        ]
        if broken is not None:
            assert isinstance(rows[broken], LocalRow)
            rows[broken].params |= {"__req__": Broken(), PREPARED_KEY: Broken()}
        logits = torch.linspace(-3.0, 3.0, VOCAB).repeat(len(places), 1)
        group = loaded.executor.group(loaded, rows)
        outcome = group.call(logits)
        return logits, dict(outcome.faults)

    logits, faults = called(1, 0, 1, 2)
    assert faults.keys() == {1}
    for place in (0, 2):
        alone, none = called(None, place)
        assert not none
        assert torch.equal(logits[place], alone[0])
