"""`--enable-deterministic-inference` on the real model: log-probabilities that are equal to the last bit."""

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
"""An output's tokens, and the most likely tokens before each, with their log-probabilities; of the prompt too."""


def params(number: int) -> SamplingParams:
    """Every second prompt is continued at random."""
    settings: dict[str, float] = (
        {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
    )
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=2, **settings)


def records(llm: LLM, numbers: Sequence[int]) -> dict[int, Record]:
    """Return the engine's results for some of the prompts, in one call."""
    outputs = llm.generate([PROMPTS[i] for i in numbers], [params(i) for i in numbers], use_tqdm=False)
    found = {}
    for number, output in zip(numbers, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        assert output.prompt_logprobs is not None
        places = [place for place in (*output.prompt_logprobs, *completion.logprobs) if place is not None]
        logprobs = [[(token, record.logprob) for token, record in place.items()] for place in places]
        found[number] = (list(completion.token_ids), logprobs)
    return found


def test_company_and_chunks_change_no_bit() -> None:
    everything = range(len(PROMPTS))
    with LLM(max_num_seqs=8, max_model_len=256, enable_deterministic_inference=True) as llm:
        alone = {number: records(llm, [number])[number] for number in everything}
        together = records(llm, everything)
        reordered = records(llm, [*reversed(everything)])
    assert together == alone
    assert reordered == alone
    for chunk_size, rows in ((7, 8), (50, 3)):
        with LLM(
            max_num_seqs=rows,
            max_model_len=256,
            chunked_prefill_size=chunk_size,
            enable_deterministic_inference=True,
        ) as llm:
            assert records(llm, everything) == alone
