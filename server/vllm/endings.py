"""The ends of requests, from the workers to the API servers, which are processes of their own: faults, or receipts.

A worker does not know of a request's last output before its next step. So it attaches an ending to each output that may
be the last one. It is attached as JSON, the bytes of a tensor in a field that the engine core passes on as it is: the
log-probabilities of prompt tokens that V2 computes on request, which are floats. So are the sampling records of tokens,
if a request asks for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from logitship.client.http.responses import parse_receipts
from logitship.client.records import Receipt
from logitship.sampler.row_errors import SamplingEditsTooLongError
from logitship.server.runtime.response_receipts import RECEIPTS
from logitship.server.schemas.response_schemas import receipt_objects

from .output_records import add_record, give_records
from .sampling_recorder import RecordedRow
from .settings import logger

_FAULT, _RECORD, _NO_RECORD = "fault", "sampling_record", "no_record"
_CARRIER = "prompt_token_id_logprobs"


@dataclass(frozen=True)
class Ending:
    """The end of a request, if the tokens of a step end it.

    Attributes:
        fault: the text of its fault, if the last token is the fault token.
        receipts: otherwise the receipts of its processors behind its last tokens: an item for each number of draft
            tokens that vLLM may accept, from 0 on.
        ends_at: the tokens that end it; None: any token may.
    """

    fault: str | None
    receipts: Sequence[Sequence[Receipt]]
    ends_at: frozenset[int] | None

    def to_json(self, tokens: Sequence[int], fault_token: int) -> dict[str, Any]:
        """Return what is attached to the output with these tokens; empty: they do not end the request."""
        if self.fault is not None and tokens[-1:] == [fault_token]:
            return {_FAULT: self.fault}
        if not self.receipts or not tokens or (self.ends_at is not None and self.ends_at.isdisjoint(tokens)):
            return {}
        return {RECEIPTS: [receipt_objects(each) for each in self.receipts[: len(tokens)]]}


def missing_carrier() -> list[str]:
    """Return the name of the field if the outputs of this vLLM do not have it."""
    from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore[reportMissingImports]

    name = f"{_CARRIER}_dict"
    return [] if name in ModelRunnerOutput.__dataclass_fields__ else [f"ModelRunnerOutput.{name}"]


def send_endings(
    runner: Any,
    take_endings: Callable[[], Mapping[str, Ending]],
    fault_token: int,
    take_sampled: Callable[[], Mapping[str, RecordedRow]] = dict,
) -> None:
    """Attach the ends of requests to what a model runner samples.

    Args:
        runner: vLLM's `GPUModelRunner`.
        take_endings: returns those of the step by request id.
        fault_token: the last token of requests that end with a fault.
        take_sampled: returns the rows of requests that ask for sampling records, by request id.
    """
    sample_tokens = runner.sample_tokens

    @wraps(sample_tokens)
    def with_endings(*args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(*args, **kwargs)
        endings, sampled = take_endings(), take_sampled()
        if not endings and not sampled:
            return output
        get_output = getattr(output, "get_output", None)
        if get_output is None:
            return _attach(output, endings, sampled, fault_token)
        # The tokens are not on the host yet.
        output.get_output = lambda: _attach(get_output(), endings, sampled, fault_token)
        return output

    runner.sample_tokens = with_endings


def _attach(output: Any, endings: Mapping[str, Ending], sampled: Mapping[str, RecordedRow], fault_token: int) -> Any:
    """Attach endings to the rows whose tokens may be their last, in place of nothing that the client asked for."""
    rows, existing = output.req_id_to_index, output.prompt_token_id_logprobs_dict
    attached = {}
    for rid in endings.keys() | sampled.keys():
        tokens = output.sampled_token_ids[rows[rid]] if rid in rows else []
        found = endings[rid].to_json(tokens, fault_token) if rid in endings else {}
        if rid in sampled and tokens and _FAULT not in found:
            found |= _recorded(sampled[rid], tokens[0])
        if found and (rid not in existing or _FAULT in found):
            attached[rid] = to_tensor(found)
    if attached:
        output.prompt_token_id_logprobs_dict = {**existing, **attached}
    return output


def to_tensor(attached: Mapping[str, Any]) -> torch.Tensor:
    """Return what is attached to an output in the form in which the engine core passes it on."""
    return torch.frombuffer(bytearray(json.dumps(attached).encode()), dtype=torch.uint8)


def _recorded(row: RecordedRow, token: int) -> dict[str, Any]:
    try:
        return {_RECORD: row.record(token).to_json()}
    except SamplingEditsTooLongError as error:
        return {_NO_RECORD: str(error)}
    except Exception:  # noqa: BLE001  # boundary: vLLM
        logger.exception("the sampling of a token cannot be recorded")
        return {_NO_RECORD: "return_sampling_mask: the server could not record a token: its log has the details"}


def process_outputs(
    process: Callable[..., Any], processor: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """End requests whose processors failed with the text of the fault, and add receipts to those that finish.

    Completions also get the sampling records of their tokens. A hook around the method of vLLM's `OutputProcessor`.
    """
    found = []
    for output in outputs:
        attached = _detach(output)
        if _FAULT in attached and output.finish_reason is not None:
            output.finish_reason = type(output.finish_reason).ERROR
            output.stop_reason, output.new_token_ids, output.new_logprobs = attached[_FAULT], [], None
        if attached.keys().isdisjoint({RECEIPTS, _RECORD, _NO_RECORD}):
            continue
        state = processor.request_states.get(output.request_id)
        if state is not None:
            if not attached.keys().isdisjoint({_RECORD, _NO_RECORD}):
                add_record(state, attached.get(_RECORD), attached.get(_NO_RECORD))
            found.append((state, output, attached))
    result = process(processor, outputs, *args, **kwargs)
    for state, output, attached in found:
        # vLLM may have dropped tokens: those behind a stop string.
        receipts = attached.get(RECEIPTS, [()])[: len(output.new_token_ids) or 1][-1]
        for completion in _completions(state, result.request_outputs):
            if completion is not None and completion.index == state.request_index:
                give_records(state, completion)
                if completion.finish_reason and receipts:
                    setattr(completion, RECEIPTS, parse_receipts(receipts))
    return result


def _detach(output: Any) -> Mapping[str, Any]:
    """Return what is attached to vLLM's `EngineCoreOutput`, and detach it."""
    attached = getattr(output, _CARRIER)
    if attached is None or attached.dtype != torch.uint8:
        return {}
    setattr(output, _CARRIER, None)
    found: Mapping[str, Any] = json.loads(attached.numpy().tobytes())
    return found


def _completions(state: Any, returned: Sequence[Any]) -> Iterator[Any]:
    """Yield the outputs of a request and of others with the same prompt."""
    waiting = () if state.queue is None else (state.queue.output,)
    for output in (*returned, *waiting):
        if getattr(output, "request_id", None) == state.external_req_id:
            yield from output.outputs
    if state.parent_req is not None:
        yield from state.parent_req.output_aggregator  # until all of them have finished


def readable(text: str) -> str:
    """Return a text whose source lines vLLM passes on: it removes lines of tracebacks from its error messages."""
    return re.sub(r'File ("[^"\n]+"), line', r"File \1 line", text)
