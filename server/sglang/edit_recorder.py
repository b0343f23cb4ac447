"""Records what a step does to the logits of requests with `return_sampling_edits`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from logitship.sampler.ops.sampling_masks import SamplingEdit
from logitship.sampler.ops.top_k_top_p import kept_tokens
from logitship.sampler.row_errors import SamplingEditsTooLongError
from logitship.sampler.sampling_edits import edits_after_penalties, edits_between
from logitship.server.requests.sampling_records import sampling_edits
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship_sglang import logger

_EDGE = 1e-3
"""Added to top-p."""
_STAGES = 3
"""The model's logits, those before and after the processors: all that SGLang does between them and the temperature."""


class EditRecorder:
    """The recorded rows of one step.

    Args:
        rows: the requests with processors, by row of the batch.
        logits: the model's logits, [rows, vocab].
    """

    def __init__(self, rows: Mapping[int, TrackedRequest], logits: torch.Tensor) -> None:
        self._requests = {row: request for row, request in rows.items() if request.record.records_edits}
        self._stages: dict[int, list[torch.Tensor]] = {row: [] for row in self._requests}
        self.record(logits)

    def record(self, logits: torch.Tensor) -> None:
        """Record a stage: the logits of all rows, [rows, vocab]."""
        for row, stages in self._stages.items():
            stages.append(logits[row].float().clone())

    def add_to(self, output: Any, num_rows: int, name: str, called: Collection[int]) -> None:
        """Add the edits to what SGLang sends to the front end for each token: nothing, if no row is recorded.

        Waits for the device.

        Args:
            output: SGLang's `LogitsProcessorOutput`.
            num_rows: rows of the batch.
            name: what they are called there.
            called: rows whose processors were called in this step. A token that SGLang samples again, because it had
                retracted the request, has the edits of the first time.
        """
        for row, request in self._requests.items():
            if row in called:
                request.record.edits = self._edits_of(row)
        if self._requests:
            of_rows = {row: request.record.edits for row, request in self._requests.items()}
            edits = [of_rows.get(row) for row in range(num_rows)]
            output.customized_info = {**(output.customized_info or {}), name: edits}

    def _edits_of(self, row: int) -> dict[str, Any] | None:
        request, stages = self._requests[row], self._stages[row]
        req = request.record.req()
        if req is None or len(stages) < _STAGES:
            return None  # it ends
        try:
            return sampling_edits([self._found(request, req.sampling_params, stages)]).to_json(np.dtype("<u4"))
        except SamplingEditsTooLongError as error:
            return {"error": str(error)}
        except Exception:  # noqa: BLE001  # boundary: other engine
            logger.exception("the edits of request %s cannot be recorded", request.rid)
            return {"error": "return_sampling_edits: the server could not record them: its log has the details"}

    def _found(self, request: TrackedRequest, params: Any, stages: Sequence[torch.Tensor]) -> list[SamplingEdit]:
        tokens = _likely(stages[-1], params).cpu().numpy()
        model, before, after = (stage.cpu().numpy() for stage in stages)
        biases = {int(token): bias for token, bias in (params.logit_bias or {}).items()}
        seen = [*request.prompt_token_ids, *request.output_token_ids]
        return [
            *edits_after_penalties(model, before, tokens, biases, params.repetition_penalty, seen),
            *edits_between(before[tokens], after[tokens], tokens, "a logits processor"),
        ]


def _likely(logits: torch.Tensor, params: Any) -> torch.Tensor:
    """Return the tokens that SGLang may keep, and a few more: it has its own rounding, and its own order of filters."""
    kept = logits.isfinite()
    if params.top_k < len(logits):
        kept = kept_tokens(logits, params.top_k, 1.0)
    elif params.top_p < 1:
        kept = kept_tokens(logits / params.temperature, -1, min(1.0, params.top_p + _EDGE))
    return kept.nonzero()[:, 0]
