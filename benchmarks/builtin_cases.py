"""Cases of `builtin_step.py`: built-in processors with parameters and histories that give them work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors import installed_processors
from logitship.builtin_processors.thinking_budget import ThinkingBudgetLogitProcessor
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.sampler.batch_processors.interface import LogitsProcessor
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, SchedulerConfig, VllmConfig

VOCAB_SIZE = 202_048
"""Holds the tokens of all models that SGLang has a thinking budget for."""

NUM_DISALLOWED = 100
NEVER = 1_000_000
"""A budget that no history exhausts."""


@dataclass(frozen=True)
class Case:
    """Line of the table.

    Attributes:
        processor: the name it is installed under, or the batch processor's sampling parameter.
        params: makes the request's parameters, given its row; a batch processor's are sampling parameters.
        history: makes a row's first tokens, which random ones follow.
        repeats: the tokens that follow instead of random ones, over and over; None: random ones.
        prompt_length: tokens of the history that are the prompt; None: half of it.
        says: difference from other cases of the processor.
        sglang_class: SGLang's equivalent; None if there is none.
        make_batch_processor: constructor of a batch processor; None for a `CustomLogitProcessor`.
    """

    processor: str
    params: Callable[[int], dict[str, Any]]
    history: Callable[[int], list[int]] = lambda row: []
    repeats: tuple[int, ...] | None = None
    prompt_length: int | None = None
    says: str = ""
    sglang_class: str | None = None
    make_batch_processor: Callable[[], LogitsProcessor] | None = None

    @property
    def title(self) -> str:
        """Title of the row."""
        return f"{self.processor}, {self.says}" if self.says else self.processor

    def tokens(self, row: int, length: int) -> list[int]:
        """Return the tokens of a row."""
        generator = random.Random(row)
        begin = self.history(row)
        if self.repeats is not None:
            return (begin + [*self.repeats] * length)[:length]
        # Ordinary ones: most models have their special tokens, which start and end thinking, in front or at the end.
        return begin + [generator.randrange(1000, 100_000) for _ in range(length - len(begin))]


def random_tokens(row: int) -> list[int]:
    """Return random tokens to disallow."""
    return random.Random(-1 - row).sample(range(VOCAB_SIZE), NUM_DISALLOWED)


def _thinking_cases() -> list[Case]:
    """Return a case per model. The thinking block is open from the first token on, and never ends."""
    cases = []
    for name in installed_processors():
        processor = installed_processors().get(name)
        if issubclass(processor, ThinkingBudgetLogitProcessor):
            cases.append(
                Case(
                    name,
                    lambda row: {"thinking_budget": NEVER},
                    lambda row, start=processor.THINKING_START_TOKEN_ID: [start],  # type: ignore[misc]
                    sglang_class=processor.__name__,
                )
            )
    return cases


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte: the texts need not be a real model's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")  # type: ignore[no-untyped-call]


TOKENIZER = _tokenizer()
DIGIT, COMMA = TOKENIZER.encode("7,")
TREE = {"start_token_id": 1, "end_token_id": 0, "prefix_dict": {"1": list(range(1000)), "1_5": [6]}}

QWEN3_MARKERS = {"start": [151667], "end": [151668], "newline": [198]}
LONG_MARKERS = {"start": [27, 26865, 29], "end": [522, 26865, 29], "newline": [198]}


def _thinking_token_budget() -> LogitsProcessor:
    reasoning = ReasoningConfig(
        reasoning_start_str="<think>",
        reasoning_end_str="</think>",
        reasoning_start_token_ids=LONG_MARKERS["start"],
        reasoning_end_token_ids=LONG_MARKERS["end"],
        natural_reasoning_end_token_ids=LONG_MARKERS["end"],
    )
    config = VllmConfig(SchedulerConfig(max_num_seqs=256), reasoning_config=reasoning)
    return ThinkingTokenBudgetLogitsProcessor(config, torch.device("cpu"), is_pin_memory=False)


_CASES = [
    Case(
        "disallowed_tokens",
        lambda row: {"token_ids": random_tokens(0)},
        says="one list",
        sglang_class="DisallowedTokensLogitsProcessor",
    ),
    Case("disallowed_tokens", lambda row: {"token_ids": random_tokens(row)}, says="each its own"),
    Case(
        "no_repeat_ngram",
        lambda row: {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [128821, 128822]},
        says="30 in 90",
        sglang_class="DeepseekOCRNoRepeatNGramLogitProcessor",
    ),
    Case(
        "no_repeat_ngram",
        lambda row: {"ngram_size": 3, "window_size": 100_000},
        says="3 in all",
        sglang_class="DeepseekOCRNoRepeatNGramLogitProcessor",
    ),
    *_thinking_cases(),
    Case(
        "qwen3_thinking_budget",
        lambda row: {"thinking_budget": 0},
        lambda row: [151667],
        says="spent",
        sglang_class="Qwen3ThinkingBudgetLogitProcessor",
    ),
    Case(
        "thinking_budget",
        lambda row: {"thinking_budget": NEVER, **QWEN3_MARKERS},
        lambda row: [151667],
        says="one token",
        sglang_class="Qwen3ThinkingBudgetLogitProcessor",
    ),
    Case(
        "thinking_budget",
        lambda row: {"thinking_budget": NEVER, **LONG_MARKERS},
        lambda row: list(LONG_MARKERS["start"]),
        says="three tokens",
    ),
    Case(
        "thinking_token_budget",
        lambda row: {"thinking_token_budget": NEVER},
        lambda row: list(LONG_MARKERS["start"]),
        make_batch_processor=_thinking_token_budget,
    ),
    Case("think_mode", lambda row: {"max_thinking_tokens": NEVER, "end_think_token_ids": LONG_MARKERS["end"]}),
    Case("multi_sequence", lambda row: {"eos_token_ids": [2]}),
    Case("tree", lambda row: {"tree": TREE}),
    Case(
        "grammar",
        lambda row: {"ebnf": 'root ::= ([0-9] ",")*'},
        repeats=(DIGIT, COMMA),
        says="EBNF",
    ),
    Case("grammar", lambda row: {"regex": "([0-9],)*"}, repeats=(DIGIT, COMMA), says="regular expression"),
    Case("gen_length", lambda row: {"boost_factor": 1e-6}),
    Case(
        "cite_from_prompt",
        lambda row: {"boost_factor": 1e-6, "conditional_boost_factor": 1e-6},
        prompt_length=50,
        says="short prompt",
    ),
    Case(
        "cite_from_prompt",
        lambda row: {"boost_factor": 1e-6, "conditional_boost_factor": 1e-6},
        says="half is prompt",
    ),
    Case("force_last_phrase", lambda row: {"phrase": "Done."}),
    Case("prevent_hallucination", lambda row: {"phrase": "Done.", "tolerate": NEVER}),
    Case("dry", lambda row: {"dry_multiplier": 0.8}, says="random history"),
    Case("dry", lambda row: {"dry_multiplier": 0.8}, repeats=(DIGIT, DIGIT, COMMA), says="a loop"),
    Case("xtc", lambda row: {"xtc_probability": 0.5}),
    Case("top_n_sigma", lambda row: {"top_n_sigma": 1.0}),
    Case("typical_p", lambda row: {"typical_p": 0.9}),
    Case("tfs", lambda row: {"tfs_z": 0.95}),
    Case("min_k", lambda row: {}),
    Case("top_h", lambda row: {"top_h": 0.4}),
    Case("p_less", lambda row: {}),
    Case("mirostat_2", lambda row: {}),
    Case("dynamic_temperature", lambda row: {"dynatemp_range": 0.5}),
    Case("quadratic", lambda row: {"smoothing_factor": 0.3}),
    Case("entropy_stop", lambda row: {"entropy_threshold": 0.0}),
]

CASES = [case for case in _CASES if case.make_batch_processor or case.processor in installed_processors()]
