"""Calls a processor in this process, where its exceptions, its attributes and its lines can be looked at.

What it does is judged in the sandbox. This only explains it, and runs after the sandbox found nothing that hangs. The
class is the one that travelled: a copy, so that the author's own keeps its attributes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch

from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.author_errors import author_traceback, error_text
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.code_names import functions_of
from logitship.client.serialization.loading import instantiate, load_class, names_in_use
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.group_snapshot import GroupSnapshot
from logitship.sampler.sandbox.worker import SequenceState

from .recording import Recording


@dataclass(frozen=True)
class GroupError:
    """What a call of several rows raised."""

    text: str
    traceback: str


@dataclass
class Facts:
    """What a rehearsal of a few steps with all sequences showed.

    Attributes:
        dtype: of the tensor that was returned; None if there was none.
        error: what a call raised, or None.
        changed: attributes of `self` and of the class, and globals, that a later call changed.
        unplain: a sequence's state or parameters hold what cannot be restored after another row's failure.
    """

    dtype: torch.dtype | None = None
    error: GroupError | None = None
    changed: list[str] = field(default_factory=list)
    unplain: bool = False


class DryRun:
    """A processor in this process, and sequences to play with.

    Args:
        string: of the class; what it runs is the author's own.
    """

    def __init__(self, string: PickledProcessor, model: ModelView) -> None:
        cls = load_class(string, {**SGLANG_NAMES, **names_in_use()})
        self.processor: CustomLogitProcessor = instantiate(cls)
        self._model = model

    def members(self, recordings: Sequence[Recording]) -> list[SequenceState]:
        """Sequences with the parameters and the prompts of recorded ones."""
        members = []
        for trial in (recording.trial for recording in recordings):
            view = RequestView(
                rid=trial.rid,
                prompt_token_ids=list(trial.prompt_token_ids),
                output_token_ids=[],
                sampling_params=SamplingParams(),
                model=self._model,
            )
            params = {**copy.deepcopy(dict(trial.params)), "__req__": view}
            members.append(SequenceState(params, view, view.output_ids))
        return members

    def call(self, members: Sequence[SequenceState], logits: torch.Tensor) -> Any:
        """What the processor returns for some rows. Raises what it raises."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self.processor(logits, [member.params for member in members])

    def facts(self, recordings: Sequence[Recording]) -> Facts:
        """Play all sequences as a batch, as long as all last."""
        facts = Facts()
        members = self.members(recordings)
        before: dict[str, bytes] | None = None
        for step in range(min((recording.steps for recording in recordings), default=0)):
            try:
                result = self.call(members, torch.stack([recording.inputs[step] for recording in recordings]))
            except BaseException as error:  # noqa: BLE001  # the author's code may raise anything
                facts.error = GroupError(error_text(error), author_traceback(error))
                break
            facts.dtype = result.dtype if isinstance(result, torch.Tensor) else None
            for member, recording in zip(members, recordings, strict=True):
                member.extend([recording.tokens[step]])
            now = self._kept()
            # What the first call makes is a table. What changes after it is what goes from call to call.
            if before is not None:
                facts.changed += [name for name in now if now[name] != before.get(name) and name not in facts.changed]
            before = now
        facts.unplain = len(GroupSnapshot(members)) < len(members)
        return facts

    def _kept(self) -> dict[str, bytes]:
        """What the processor keeps beside its sequences: names, and what stands for the values."""
        cls = type(self.processor)
        kept = {f"self.{name}": value for name, value in vars(self.processor).items()}
        kept |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items() if _is_data(name, value)}
        for function in functions_of(cls):
            named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
            kept |= {f"the global {name}": value for name, value in named.items() if _is_data(name, value)}
        return {name: _fingerprint(value) for name, value in kept.items()}


def _is_data(name: str, value: Any) -> bool:
    callables = (FunctionType, ModuleType, type, staticmethod, classmethod, property)
    return not name.startswith("__") and value is not None and not isinstance(value, callables)


def _fingerprint(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # nobody promises that it can be pickled
        return str(id(value)).encode()
