"""Clients that nobody here wrote, each with a processor attached to its requests.

They run in a virtual environment of their own that `tests/peers/clients.sh` creates (`LOGITSHIP_PEER_CACHE`, else
`~/.cache/logitship-peers`): some need other versions of logitship's dependencies.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http_server import running_server

SCRIPTS = sorted(Path(__file__).with_name("clients").glob("*_client.py"))
FAVOUR = {
    "class_name": "Favour",
    "source": """
from logitship import CustomLogitProcessor

class Favour(CustomLogitProcessor):
    '''Prefers one token to all others. Avoids white space, which JSON may have any amount of.'''
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["favoured"]] += 1000.0
            row[params["avoided"]] -= 1000.0
        return logits
""",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_client(script: Path, make_engine: Callable[..., AsyncEngine], clients_environment: Path) -> None:
    engine = make_engine(port=0, log_level="error", enable_custom_logit_processor=True, processor_isolation="none")
    params = {"favoured": engine.tokenizer.encode("O"), "avoided": engine.tokenizer.encode(" \n\r\t")}
    fields: Any = {"custom_logit_processor": FAVOUR, "custom_params": params}
    with running_server(engine.config, engine) as url:
        done = subprocess.run(
            [str(clients_environment / "bin" / "python"), str(script), f"{url}/v1", json.dumps(fields)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"},
        )
    assert done.returncode == 0, done.stderr[-4000:]
