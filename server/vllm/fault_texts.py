"""The texts of faults on their way from the workers to the API servers, which are processes of their own.

A text is attached to vLLM's output of the step in which its request ends, as the bytes of a tensor in a field that the
engine core passes on as it is: the log-probabilities of prompt tokens that V2 computes on request, which are floats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

_CARRIER = "prompt_token_id_logprobs"


def missing_carrier() -> list[str]:
    """Return the name of the field if the outputs of this vLLM do not have it."""
    from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore[reportMissingImports]

    name = f"{_CARRIER}_dict"
    return [] if name in ModelRunnerOutput.__dataclass_fields__ else [f"ModelRunnerOutput.{name}"]


def send_faults(runner: Any, take_faults: Callable[[], Mapping[str, str]], fault_token: int) -> None:
    """Attach the texts of faults to what a model runner samples.

    Args:
        runner: vLLM's `GPUModelRunner`.
        take_faults: returns the texts of the step by request id.
        fault_token: the last token of requests that end.
    """
    sample_tokens = runner.sample_tokens

    @wraps(sample_tokens)
    def with_faults(*args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(*args, **kwargs)
        faults = take_faults()
        if not faults:
            return output
        get_output = getattr(output, "get_output", None)
        if get_output is None:
            return _attach(output, faults, fault_token)
        # The tokens are not on the host yet.
        output.get_output = lambda: _attach(get_output(), faults, fault_token)
        return output

    runner.sample_tokens = with_faults


def _attach(output: Any, faults: Mapping[str, str], fault_token: int) -> Any:
    """Attach texts to the rows that end. Others, behind draft tokens that were rejected, go on."""
    rows = output.req_id_to_index
    ends = {rid for rid in faults if rid in rows and output.sampled_token_ids[rows[rid]][-1:] == [fault_token]}
    attached = {rid: torch.frombuffer(bytearray(faults[rid].encode()), dtype=torch.uint8) for rid in ends}
    output.prompt_token_id_logprobs_dict = {**output.prompt_token_id_logprobs_dict, **attached}
    return output


def take_fault(output: Any) -> str | None:
    """Return the text that is attached to an output, and detach it.

    Args:
        output: vLLM's `EngineCoreOutput`.
    """
    attached = getattr(output, _CARRIER)
    if attached is None or attached.dtype != torch.uint8:
        return None
    setattr(output, _CARRIER, None)
    return bytes(attached.tolist()).decode()


def readable(text: str) -> str:
    """Return a text whose source lines vLLM passes on: it removes lines of tracebacks from its error messages."""
    return re.sub(r'File ("[^"\n]+"), line', r"File \1 line", text)
