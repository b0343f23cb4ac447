"""One engine of `sandbox_throughput.py`: answers a number of streams with their output tokens per second.

Arguments: the model, the processor isolation, and the output tokens of each stream.
"""

from __future__ import annotations

import sys
import time
from functools import partial

from worker_process import serve

from logitship import LLM, CustomLogitProcessor, SamplingParams

PROMPT = "The moon is"


class BanSome(CustomLogitProcessor):
    """Forbids each request's own tokens, as most shipped processors do."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        """Edit the rows in place."""
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["banned"]] = -float("inf")
        return logits


def requests(streams: int, tokens: int) -> list[SamplingParams]:
    """Return one request per stream."""
    return [
        SamplingParams(
            temperature=0.8,
            top_p=0.95,
            seed=stream,
            max_tokens=tokens,
            ignore_eos=True,
            custom_logit_processor=BanSome,
            custom_params={"banned": list(range(stream, stream + 100))},
        )
        for stream in range(streams)
    ]


def tokens_per_second(llm: LLM, tokens: int, streams: int) -> float:
    """Return the output tokens per second, prefill included."""
    began = time.perf_counter()
    outputs = llm.generate([PROMPT] * streams, requests(streams, tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert sampled == streams * tokens
    return sampled / seconds


def main() -> None:
    """Serve orders."""
    model, isolation, tokens = sys.argv[1:]
    llm = LLM(model, processor_isolation=isolation)
    serve(lambda: (isolation, partial(tokens_per_second, llm, int(tokens))))
    llm.shutdown()


if __name__ == "__main__":
    main()
