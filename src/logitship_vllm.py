"""The entry point that vLLM calls in each of its processes, and in every vLLM of the environment.

It stands beside the package and imports nothing but the standard library until a vLLM is configured that names
logitship with `--logits-processors`: others run as without it.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any


def load() -> None:
    """Install the plugin's front end when a configuration names the plugin. Processes without a front end make none."""
    arguments = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    create = getattr(arguments, "create_engine_config", None)
    if arguments is None or create is None:
        return  # requests with processors are refused, see `params_validation`

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        if any("logitship" in str(each) for each in config.model_config.logits_processors or ()):
            from logitship.server.vllm.front_end_hooks import install

            install()
        return config

    arguments.create_engine_config = create_engine_config
