"""The client imports neither torch nor dill, which plain HTTP users do not need."""

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
def test_client_import_loads_no_heavy_package(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(program=program)], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
