from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from logitship.client.errors import (
    BadRequestError,
    GenerationError,
    LogitshipError,
    ProcessorFault,
    ProcessorLoadError,
)


def _pickled(error: LogitshipError) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled])
@pytest.mark.parametrize(
    "error",
    [
        ProcessorLoadError("damaged"),
        ProcessorFault("failed", digest="sha256:0", name="Ban", kind="exception", traceback="line 1"),
        BadRequestError("too long", status_code=400, param="prompt", body={"error": {}}),
        GenerationError("ended", type="AbortError", traceback="line 1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_copy_has_all_attributes(error: LogitshipError, copied: Callable[[LogitshipError], LogitshipError]) -> None:
    result = copied(error)
    assert type(result) is type(error)
    assert str(result) == str(error)
    assert vars(result) == vars(error)
