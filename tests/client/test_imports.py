"""The client stays light: a plain HTTP user pays for neither torch nor dill."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import sys
{program}
print(*sorted({{"torch", "dill", "numpy", "fastapi", "transformers"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "program",
    [
        "import logitship",
        "from logitship import *",
        "import logitship.client.client, logitship.client.processor, logitship.client.serialization.processor_string",
        "import logitship; logitship.Client().close()",
    ],
)
def test_importing_the_client_loads_nothing_heavy(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(program=program)], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
