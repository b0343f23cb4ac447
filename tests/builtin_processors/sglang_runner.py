"""Runs SGLang's real processors, in a process of its own: loading them puts modules named `sglang` into `sys.modules`.

Reads one JSON request a line and answers with one line: for each case the logits after the processor, or the name of
the exception that it raised.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def answer(module: Any, request: dict[str, Any]) -> list[Any]:
    import torch

    if request["class_name"] is None:
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        return sorted(value.__name__ for value in classes if value.__module__ == module.__name__)
    processor_class = type("Processor", (getattr(module, request["class_name"]),), request["attributes"])
    results: list[Any] = []
    for case in request["cases"]:
        rows = [
            {**row["params"], "__req__": SimpleNamespace(origin_input_ids=row["prompt"], output_ids=row["output"])}
            for row in case["rows"]
        ]
        try:
            results.append(processor_class()(torch.tensor(case["logits"]), rows).tolist())
        except Exception as error:  # noqa: BLE001  whatever SGLang raises is the answer
            results.append(type(error).__name__)
    return results


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
    import sglang_peer  # type: ignore[import-not-found, unused-ignore]

    module = sglang_peer.load().custom_logit_processor
    for line in sys.stdin:
        print(json.dumps(answer(module, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
