"""Plays sequences one by one, each alone, and keeps what came of it: what all else is compared with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import non_finite_fault

from .bench import Stage
from .test_cases import Trial


@dataclass(eq=False)
class Recording:
    """A sequence that had its processor to itself.

    Attributes:
        inputs: of each step, float32 [vocab]. One more than `outputs` if the last step failed.
        outputs: what the processor made of them, float32 [vocab].
        tokens: the token that was taken after each step: the most likely one.
        fault: why it ended early, or None.
    """

    trial: Trial
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None

    @property
    def steps(self) -> int:
        """Steps that did not fail."""
        return len(self.outputs)


def record(stage: Stage, trial: Trial, max_tokens: int, eos_token_ids: Collection[int]) -> Recording:
    """Play a sequence until it ends, fails, or has enough tokens."""
    recording = Recording(trial)
    player, source = stage.enter(trial.rid, trial.params, trial.prompt_token_ids), trial.source()
    while recording.steps < max_tokens and not set(recording.tokens[-1:]) & set(eos_token_ids):
        logits = source.next(player.tokens)
        recording.inputs.append(logits)
        called = stage.call([player], logits[None])
        output = called.logits[0]
        recording.fault = called.faults.get(0)
        if recording.fault is None and not bool(torch.isfinite(output.amax())):
            recording.fault = non_finite_fault(output, name="")
        if recording.fault is not None:
            break
        recording.outputs.append(output)
        recording.tokens.append(int(output.argmax()))
        player.tokens.append(recording.tokens[-1])
    player.row.close()
    return recording
