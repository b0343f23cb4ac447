"""`--enable-deterministic-inference` on a real model: log-probabilities are equal to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

from logitship import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "A",
    "Roses are red,\nviolets are blue,\n" * 4,
    "The three laws of robotics are: first, a robot may not injure a human being. Second,",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 5,
]
TOKENS = 6

Record = tuple[list[int], list[list[tuple[int, float]]]]
"""The tokens of an output, and at each position of prompt and output the most likely tokens with log-probabilities."""


def params(number: int) -> SamplingParams:
    """Return parameters of a prompt: greedy and random ones alternate."""
    settings: dict[str, float] = (
        {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
    )
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=2, **settings)


def records(llm: LLM, numbers: Sequence[int]) -> dict[int, Record]:
    """Generate for some of the prompts in one call."""
    outputs = llm.generate([PROMPTS[i] for i in numbers], [params(i) for i in numbers], use_tqdm=False)
    found = {}
    for number, output in zip(numbers, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        assert output.prompt_logprobs is not None
        tables = [table for table in (*output.prompt_logprobs, *completion.logprobs) if table is not None]
        logprobs = [[(token, record.logprob) for token, record in table.items()] for table in tables]
        found[number] = (list(completion.token_ids), logprobs)
    return found


def test_logprobs_are_batch_invariant(shallow_model: str) -> None:
    numbers = range(len(PROMPTS))
    with LLM(shallow_model, max_num_seqs=8, max_model_len=256, enable_deterministic_inference=True) as llm:
        single = {number: records(llm, [number])[number] for number in numbers}
        batched = records(llm, numbers)
        reordered = records(llm, [*reversed(numbers)])
    assert batched == single
    assert reordered == single
    for chunk_size, rows in ((7, 8), (50, 3)):
        with LLM(
            shallow_model,
            max_num_seqs=rows,
            max_model_len=256,
            chunked_prefill_size=chunk_size,
            enable_deterministic_inference=True,
        ) as llm:
            assert records(llm, numbers) == single
