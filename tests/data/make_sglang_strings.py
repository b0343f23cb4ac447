"""Records processor strings made by SGLang's own code. See README.md beside this file.

Run under the Python to record, which has torch, dill and orjson, without logitship.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import dill

sys.path.append(str(Path(__file__).parents[1] / "peers"))
import sglang_peer

module = sglang_peer.load().custom_logit_processor
Base: Any = module.CustomLogitProcessor


class ForceToken(Base):  # type: ignore[misc]
    """Only custom_params['token_id'] may be sampled."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        assert logits.shape[0] == len(custom_param_list)
        for i, pd in enumerate(custom_param_list):
            logits[i, :] = -float("inf")
            logits[i, pd["token_id"]] = 0.0
        return logits


class Boost(Base):  # type: ignore[misc]
    """Adds 7.5 to custom_params['token_id'] and returns a new tensor in float64 (SGLang casts it back)."""

    BOOST = 7.5

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        import torch

        out = logits.to(torch.float64)
        for i, pd in enumerate(custom_param_list):
            out[i, pd["token_id"]] += self.BOOST
        return out


class Countdown(Base):  # type: ignore[misc]
    """Reads the history: forces prompt_len + number of output tokens, modulo the vocabulary."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        for i, pd in enumerate(custom_param_list):
            r = pd["__req__"]
            t = (len(r.origin_input_ids) + len(r.output_ids)) % logits.shape[-1]
            logits[i, :] = -float("inf")
            logits[i, t] = 0.0
        return logits


BUILTINS = [
    "DisallowedTokensLogitsProcessor",
    "Qwen3ThinkingBudgetLogitProcessor",
    "DeepSeekR1ThinkingBudgetLogitProcessor",
    "Glm4MoeThinkingBudgetLogitProcessor",
    "InklingThinkingBudgetLogitProcessor",
    "DeepseekOCRNoRepeatNGramLogitProcessor",
]

if __name__ == "__main__":
    users = [ForceToken, Boost, Countdown]
    for cls in users:
        cls.__call__.__code__ = cls.__call__.__code__.replace(co_filename="author.py")
    classes = [*(getattr(module, name) for name in BUILTINS), *users]
    strings = {cls.__name__: cls.to_str() for cls in classes}
    made_by = f"sglang {sglang_peer.VERSION} CustomLogitProcessor.to_str()"
    print(
        json.dumps(
            {"python": platform.python_version(), "dill": dill.__version__, "made_by": made_by, "strings": strings}
        )
    )
