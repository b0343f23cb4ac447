"""One side of `sampler_step.py`: times the sampler of logitship or of vLLM, in the Python that has it.

    python sampler_worker.py logitship|vllm

Where vLLM is timed it imports nothing of logitship, so that any environment with vLLM will do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
import torch
from worker_process import serve

Step = Callable[[torch.Tensor], object]
"""From logits, float32 [rows, vocab], which it may edit, to token ids (and log-probabilities) on the host."""


class Command(TypedDict):
    """Case to time.

    Attributes:
        logits: file with float32 [rows, vocab], as `numpy.save` writes it.
        temperature: 0 for greedy.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        logprobs: how many of the most likely tokens; None without log-probabilities.
        seeded: each request has a seed of its own.
        seconds: about how long to go on.
    """

    logits: str
    temperature: float
    top_k: int
    top_p: float
    logprobs: int | None
    seeded: bool
    seconds: float


def logitship_step(command: Command, rows: int, vocab_size: int) -> Step:
    """Return a step of `Sampler.sample`. Each row has its own seed, as in the engine."""
    from logitship.builtin_processors.batch_processors import BUILTIN_LOGITS_PROCESSORS
    from logitship.sampler.batch_processors.interface import BatchUpdate
    from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
    from logitship.sampler.sampler import Sampler
    from logitship.sampler.sampling_params import SamplingParams

    device = torch.device("cpu")
    builtin = LogitsProcessors(each(None, device, False) for each in BUILTIN_LOGITS_PROCESSORS)
    sampler = Sampler(vocab_size, device, builtin)
    params = [
        SamplingParams(
            temperature=command["temperature"],
            top_k=command["top_k"],
            top_p=command["top_p"],
            logprobs=command["logprobs"],
            seed=row,
        )
        for row in range(rows)
    ]
    sampler.update_state(BatchUpdate(rows, [], [(row, each, [], []) for row, each in enumerate(params)], []))
    return sampler.sample


def vllm_step(command: Command, rows: int, vocab_size: int) -> Step:
    """Run the `Sampler` of vLLM, and copy the result to the host as its model runner does."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
    builtin = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    greedy = command["temperature"] == 0
    sampler = Sampler()
    metadata = SamplingMetadata(
        temperature=None if greedy else torch.full((rows,), command["temperature"]),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=torch.full((rows,), command["top_p"]) if command["top_p"] < 1 else None,
        top_k=torch.full((rows,), command["top_k"], dtype=torch.int32) if command["top_k"] > 0 else None,
        generators={row: torch.Generator().manual_seed(row) for row in range(rows)} if command["seeded"] else {},
        max_num_logprobs=command["logprobs"],
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(each(config, torch.device("cpu"), False) for each in builtin),
    )

    def step(logits: torch.Tensor) -> object:
        output = sampler(logits, metadata)
        logprobs = output.logprobs_tensors
        return output.sampled_token_ids.tolist(), None if logprobs is None else logprobs.tolists()

    return step


SIDES: dict[str, Callable[[Command, int, int], Step]] = {"logitship": logitship_step, "vllm": vllm_step}


def seconds_of_steps(step: Step, logits: torch.Tensor, seconds: float) -> float:
    """Return the median time of a step, of as many as fit into the given time, and at least three.

    The copy of the logits that a step may edit is made before it.
    """
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        copy = logits.clone()
        began = time.perf_counter()
        step(copy)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """Report the version that runs here, then answer commands."""
    side = sys.argv[1]

    def answer(command: Command) -> float:
        logits = torch.from_numpy(np.load(command["logits"]))
        step = SIDES[side](command, *logits.shape)
        with torch.inference_mode():
            step(logits.clone())  # the first call pays for what is loaded late
            return seconds_of_steps(step, logits, command["seconds"])

    def start() -> tuple[dict[str, str], Callable[[Command], float]]:
        module = __import__(side)
        if side == "vllm":
            from vllm.platforms import current_platform

            current_platform.import_kernels()
        return {"version": module.__version__, "torch": torch.__version__}, answer

    serve(start)


if __name__ == "__main__":
    main()
