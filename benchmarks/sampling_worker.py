"""One side of `top_k_top_p.py`: times draws of logitship or of vLLM, in the Python that has it.

Reads one JSON object a line (`RoundOrder`), answers each with a JSON list of seconds, one for each call. Where vLLM is
timed it imports nothing of logitship, so that any environment with vLLM will do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypedDict

import numpy as np
import torch

Draw = Callable[[torch.Tensor], Any]
"""Takes logits, float32 [rows, vocab], which it may edit."""


class RoundOrder(TypedDict):
    """What to time.

    Attributes:
        logits: file with float32 [rows, vocab], as `numpy.save` writes it.
        stage: "draw", from logits to token ids in a tensor, or "sampler", the whole step to token ids in Python.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        calls: how often, each on a copy of the logits.
    """

    logits: str
    stage: str
    top_k: int
    top_p: float
    calls: int


def logitship_draw(stage: str, rows: int, vocab_size: int, top_k: int, top_p: float) -> Draw:
    """The draw as `Sampler` does it, or all of `Sampler.sample`. Each row has a seed of its own, as always here."""
    from logitship.builtin_processors.logit_bias import LogitBiasLogitsProcessor
    from logitship.builtin_processors.min_p import MinPLogitsProcessor
    from logitship.builtin_processors.min_tokens import MinTokensLogitsProcessor
    from logitship.sampler.interface import BatchUpdate
    from logitship.sampler.logits_processors import LogitsProcessors
    from logitship.sampler.ops.draw import draw, draw_top_k_top_p
    from logitship.sampler.ops.random_numbers import uniform_numbers
    from logitship.sampler.sampler import Sampler
    from logitship.sampler.sampling_params import SamplingParams

    if stage == "sampler":
        device = torch.device("cpu")
        builtin = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
        sampler = Sampler(vocab_size, device, LogitsProcessors(each(None, device, False) for each in builtin))
        params = [SamplingParams(top_k=top_k, top_p=top_p, temperature=0.8, seed=row) for row in range(rows)]
        sampler.update_state(BatchUpdate(rows, [], [(row, each, [], []) for row, each in enumerate(params)], []))
        return lambda logits: sampler.sample(logits).token_ids

    seeds, positions = np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64)
    k, p = torch.full((rows,), top_k), torch.full((rows,), top_p, dtype=torch.float64)

    def draw_rows(logits: torch.Tensor) -> torch.Tensor:
        numbers = torch.from_numpy(uniform_numbers(seeds, positions))
        probabilities = logits.softmax(dim=-1)
        if top_k == 0 and top_p == 1:
            return draw(probabilities, numbers)
        return draw_top_k_top_p(logits, probabilities, k, p, numbers)

    return draw_rows


def vllm_draw(stage: str, rows: int, vocab_size: int, top_k: int, top_p: float) -> Draw:
    """vLLM's `TopKTopPSampler`, or its `Sampler`. Without seeds of the requests: they would cost it a loop."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    current_platform.import_kernels()
    k = torch.full((rows,), top_k, dtype=torch.int32) if top_k > 0 else None
    p = torch.full((rows,), top_p) if top_p < 1 else None
    if stage == "draw":
        topk_topp_sampler = TopKTopPSampler()
        return lambda logits: topk_topp_sampler(logits, {}, k, p)

    sampler = Sampler()
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), 0.8),
        all_greedy=False,
        all_random=True,
        top_p=p,
        top_k=k,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return lambda logits: sampler(logits, metadata).sampled_token_ids.tolist()


SIDES: dict[str, Callable[..., Draw]] = {"logitship": logitship_draw, "vllm": vllm_draw}


def seconds(draw: Draw, logits: torch.Tensor, calls: int) -> Iterator[float]:
    """Time each call. The copy of the logits that a call may edit is made before it."""
    for _ in range(calls):
        copy = logits.clone()
        start = time.perf_counter()
        draw(copy)
        yield time.perf_counter() - start


def serve(side: str, orders: TextIO, answers: TextIO) -> None:
    """Answer orders until there are no more."""
    for line in orders:
        order: RoundOrder = json.loads(line)
        logits = torch.from_numpy(np.load(order["logits"]))
        draw = SIDES[side](order["stage"], *logits.shape, order["top_k"], order["top_p"])
        with torch.inference_mode():
            draw(logits.clone())  # the first call pays for what is loaded late
            print(json.dumps(list(seconds(draw, logits, order["calls"]))), file=answers, flush=True)


def main() -> None:
    """Serve standard input, with one line first that says what runs here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # vLLM prints to standard output: what it prints goes to standard error, and the answers keep the stream.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = __import__(arguments.side)
    torch.set_num_threads(arguments.threads)
    print(json.dumps({"version": module.__version__, "torch": torch.__version__}), file=answers, flush=True)
    serve(arguments.side, sys.stdin, answers)


if __name__ == "__main__":
    main()
