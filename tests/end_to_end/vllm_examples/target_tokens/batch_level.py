"""A batch processor that keeps the state of its rows in a dict."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class TargetToken(LogitsProcessor):
    """Forces token 42 for a request with `{"target_token": 42}`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = _target(sampling_params)
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be a token id, not {target!r}")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row, params, _prompt_token_ids, _output_token_ids in batch_update.added:
            self._put(row, _target(params))
        for row in batch_update.removed:
            self._put(row, None)
        for source, destination, direction in batch_update.moved:
            coming, going = self.targets.get(source), self.targets.get(destination)
            self._put(destination, coming)
            self._put(source, going if direction is MoveDirectionality.SWAP else None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            return logits
        rows = torch.tensor(list(self.targets), device=logits.device)
        columns = torch.tensor(list(self.targets.values()), device=logits.device)
        kept = logits[rows, columns]
        logits[rows] = -torch.inf
        logits[rows, columns] = kept
        return logits

    def _put(self, row: int, target: int | None) -> None:
        if target is None:
            self.targets.pop(row, None)
        else:
            self.targets[row] = target


def _target(params: SamplingParams) -> int | None:
    return (params.extra_args or {}).get("target_token")
