"""The base class that authors subclass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError


class Shift(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits + sum(params["by"] for params in custom_param_list or [])


def test_to_str_from_str_round_trip() -> None:
    processor = CustomLogitProcessor.from_str(Shift.to_str())
    assert isinstance(processor, CustomLogitProcessor)
    assert type(processor) is not Shift
    assert type(processor).__name__ == "Shift"
    assert processor(torch.zeros(1, 2), [{"by": 2.0}]).tolist() == [[2.0, 2.0]]


def test_from_str_accepts_source_form() -> None:
    text = (
        '{"source": "from logitship import CustomLogitProcessor\\nclass Keep(CustomLogitProcessor):\\n'
        '    def __call__(self, logits, params=None): return logits", "class_name": "Keep"}'
    )
    assert type(CustomLogitProcessor.from_str(text)).__name__ == "Keep"


@pytest.mark.parametrize("text", ['{"name": "disallowed_tokens"}', '{"digest": "sha256:' + "0" * 64 + '"}'])
def test_from_str_rejects_registered_and_installed_names(text: str) -> None:
    with pytest.raises(ProcessorLoadError, match="only names a processor on a server"):
        CustomLogitProcessor.from_str(text)


def test_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CustomLogitProcessor()  # type: ignore[abstract]
