"""SGLang's own code for custom logit processors, to test against.

SGLang is not installed. pip downloads its wheel once into a cache folder (`LOGITSHIP_PEER_CACHE`, by default
`~/.cache/logitship-peers`), and two of its files are used:

- `sglang/srt/sampling/custom_logit_processor.py`, under its real dotted name;
- `apply_custom_logit_processor`, cut out of `sglang/srt/layers/sampler.py`: the rest of that file needs GPU kernels.

It needs torch, dill and orjson, but not logitship: tests run it in a process without logitship.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

VERSION = "0.5.23"
MODULE = "sglang.srt.sampling.custom_logit_processor"
_SAMPLER = Path("sglang/srt/layers/sampler.py")


@dataclass
class _Entry:
    """SGLang's record of one processor's rows."""

    processor: Any
    rows: list[int]
    indices: torch.Tensor


class _BatchInfo:
    """Fake of SGLang's batch, with the attributes that its function reads."""

    def __init__(
        self, entries: dict[int, _Entry], custom_params: Sequence[dict[str, Any] | None], device: torch.device
    ) -> None:
        self.custom_logit_processor = entries
        self.custom_params = custom_params
        self.device = device

    def __len__(self) -> int:
        return len(self.custom_params)


@dataclass(frozen=True)
class Peer:
    """SGLang's code.

    Attributes:
        custom_logit_processor: SGLang's module of that name.
        function: its `apply_custom_logit_processor`.
    """

    custom_logit_processor: ModuleType
    function: Callable[..., None]

    def apply(
        self,
        logits: torch.Tensor,
        rows_by_processor: Sequence[tuple[Any, Sequence[int]]],
        custom_params: Sequence[dict[str, Any] | None],
    ) -> None:
        """Run SGLang's function once.

        Args:
            logits: [rows, vocab], edited in place.
            rows_by_processor: processors, each with its rows in ascending order.
            custom_params: the parameters of each row's request.
        """
        self.step(rows_by_processor, custom_params)(logits)

    def step(
        self,
        rows_by_processor: Sequence[tuple[Any, Sequence[int]]],
        custom_params: Sequence[dict[str, Any] | None],
        device: torch.device = torch.device("cpu"),  # noqa: B008  # does not change
    ) -> Callable[[torch.Tensor], None]:
        """Return a function for several steps of one batch. SGLang keeps the batch's records between steps."""
        entries = {
            i: _Entry(p, list(rows), torch.tensor(rows, device=device)) for i, (p, rows) in enumerate(rows_by_processor)
        }
        batch = _BatchInfo(entries, custom_params, device)
        return lambda logits: self.function(logits, batch, 1)


def load() -> Peer:
    """Load SGLang's code, and download it if necessary."""
    root = _unpacked()
    return Peer(_load_module(root), _load_step(root))


def _unpacked() -> Path:
    cache = Path(os.environ.get("LOGITSHIP_PEER_CACHE", Path.home() / ".cache" / "logitship-peers"))
    root = cache / f"sglang-{VERSION}"
    if not (root / _SAMPLER).exists():
        root.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(root), f"sglang=={VERSION}"]
        subprocess.run(pip, check=True)
        wheel = next(root.glob("sglang-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if n.startswith("sglang/srt/sampling/") or n == str(_SAMPLER)]
            archive.extractall(root, sorted(wanted, key=lambda name: name == str(_SAMPLER)))
        wheel.unlink()
    return root


def _load_module(root: Path) -> ModuleType:
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    parts = MODULE.split(".")
    for depth in range(1, len(parts)):  # skip the packages' __init__.py, which would import the whole engine
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(root.joinpath(*parts[:depth]))]
        sys.modules[package.__name__] = package
    spec = importlib.util.spec_from_file_location(MODULE, root.joinpath(*parts).with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    for depth in range(1, len(parts)):  # set attributes as a real import does: dill then pickles by reference
        setattr(sys.modules[".".join(parts[:depth])], parts[depth], sys.modules[".".join(parts[: depth + 1])])
    return module


def _load_step(root: Path) -> Callable[..., None]:
    name = "apply_custom_logit_processor"
    tree = ast.parse((root / _SAMPLER).read_text())
    function = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    scope: dict[str, Any] = {"torch": torch, "logger": logging.getLogger("sglang"), "SamplingBatchInfo": object}
    exec(compile(ast.Module([*function], []), str(_SAMPLER), "exec"), scope)
    step: Callable[..., None] = scope[name]
    return step
