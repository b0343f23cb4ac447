"""Dry run: calls to a processor in this process, where its exceptions, attributes and lines can be inspected.

The verdicts come from the sandbox. The dry run only explains them, and starts only if no call hung in a sandbox. It
uses a deserialized copy of the class, so that the author's own class keeps its attributes.
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
from logitship.client.serialization.loading import instantiate_prepared, load_class, names_in_use
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.group_snapshot import GroupSnapshot
from logitship.sampler.sandbox.worker import SequenceState

from .replayed_calls import Recording


@dataclass
class DryRunFacts:
    """Facts from a dry run of a few steps with all sequences.

    Attributes:
        dtype: of the returned tensor; None if no tensor was returned.
        error: the exception of a call, or "".
        traceback: traceback of this exception, or "".
        changed: attributes of `self` and of the class, and globals, that changed after the first call.
        edited_histories: attributes of `__req__` with token ids that a call changed.
        has_unrestorable_state: the state or parameters of a sequence cannot be restored when another row fails.
    """

    dtype: torch.dtype | None = None
    error: str = ""
    traceback: str = ""
    changed: list[str] = field(default_factory=list)
    edited_histories: list[str] = field(default_factory=list)
    has_unrestorable_state: bool = False


class DryRun:
    """A processor in this process.

    Args:
        string: the parsed processor string. Loading it runs the author's own code.
        model: the model as processors see it.
    """

    def __init__(self, string: PickledProcessor, model: ModelView) -> None:
        cls = load_class(string, {**SGLANG_NAMES, **names_in_use()})
        self.processor: CustomLogitProcessor = instantiate_prepared(cls, model.tokenizer, model.vocab_size)
        self._model = model

    def members(self, recordings: Sequence[Recording]) -> list[SequenceState]:
        """Return new sequences with the parameters and prompts of the recordings."""
        members = []
        for case in (recording.case for recording in recordings):
            view = RequestView(
                rid=case.rid,
                prompt_token_ids=list(case.prompt_token_ids),
                output_token_ids=[],
                sampling_params=SamplingParams(),
                model=self._model,
            )
            params = {**copy.deepcopy(dict(case.params)), "__req__": view}
            members.append(SequenceState(params, view, view.output_ids))
        return members

    def call(self, members: Sequence[SequenceState], logits: torch.Tensor) -> Any:
        """Call the processor for some rows, and return its result. Its exceptions propagate.

        Args:
            members: one per row.
            logits: float32 [rows, vocab].
        """
        with contextlib.redirect_stdout(io.StringIO()):
            return self.processor(logits, [member.params for member in members])

    def facts(self, recordings: Sequence[Recording]) -> DryRunFacts:
        """Run all sequences as a batch, until the first one ends."""
        facts = DryRunFacts()
        members = self.members(recordings)
        before: dict[str, bytes] | None = None
        for step in range(min((recording.steps for recording in recordings), default=0)):
            try:
                result = self.call(members, torch.stack([recording.inputs[step] for recording in recordings]))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # boundary: author code
                facts.error, facts.traceback = error_text(error), author_traceback(error)
                break
            facts.dtype = result.dtype if isinstance(result, torch.Tensor) else None
            facts.edited_histories = _edited_histories(members, recordings, step)
            if facts.edited_histories:
                break
            for member, recording in zip(members, recordings, strict=True):
                member.extend([recording.tokens[step]])
            now = self._attributes_and_globals()
            # The first call may fill tables. Later changes are state that is kept from call to call.
            if before is not None:
                facts.changed += [name for name in now if now[name] != before.get(name) and name not in facts.changed]
            before = now
        facts.has_unrestorable_state = len(GroupSnapshot(members)) < len(members)
        return facts

    def _attributes_and_globals(self) -> dict[str, bytes]:
        """Return fingerprints of the attributes and globals that the processor uses, by name."""
        cls = type(self.processor)
        kept = {f"self.{name}": value for name, value in vars(self.processor).items()}
        kept |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items() if _is_data(name, value)}
        for function in functions_of(cls):
            named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
            kept |= {f"the global {name}": value for name, value in named.items() if _is_data(name, value)}
        return {name: _fingerprint(value) for name, value in kept.items()}


def _edited_histories(members: Sequence[SequenceState], recordings: Sequence[Recording], step: int) -> list[str]:
    """Return the attributes with token ids that a call in this step changed."""
    edited = {
        name
        for member, recording in zip(members, recordings, strict=True)
        for name, given in (
            ("origin_input_ids", list(recording.case.prompt_token_ids)),
            ("output_ids", recording.tokens[:step]),
        )
        if getattr(member.view, name, None) != given
    }
    return sorted(edited)


def _is_data(name: str, value: Any) -> bool:
    callables = (FunctionType, ModuleType, type, staticmethod, classmethod, property)
    return not name.startswith("__") and value is not None and not isinstance(value, callables)


def _fingerprint(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # boundary: author code
        return str(id(value)).encode()
