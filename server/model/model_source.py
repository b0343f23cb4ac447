"""Sources of models: folders, GGUF files and the Hugging Face hub; checked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from logitship.server.config import DEFAULT_MODEL
from logitship.server.refusals import StartError

from .default_model import default_model_folder

_HUB_TIMEOUT = 10.0
"""Seconds."""


class ModelLoadError(StartError):
    """The model or its tokenizer could not be loaded; the message says what to do."""


@dataclass(frozen=True)
class ModelSource:
    """Arguments of `from_pretrained`: a folder, a hub name, or a GGUF file in a folder."""

    name: str
    options: dict[str, Any]


def find_model(path: str, trust_remote_code: bool, what: str = "model") -> ModelSource:
    """Find a model or a tokenizer.

    Args:
        path: a folder, a GGUF file, or a hub name.
        trust_remote_code: run code that comes with it.
        what: `model` or `tokenizer`, for error messages.

    Raises:
        ModelLoadError: there is none.
        ModelFetchError: it is the default model, and could not be fetched.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if path == DEFAULT_MODEL:
        return ModelSource(str(default_model_folder()), options)
    file = Path(os.path.expanduser(path))  # `Path.expanduser` fails for unknown users
    if path.endswith(".gguf"):
        if not file.is_file():
            raise ModelLoadError(f"there is no GGUF file {path!r}")
        return ModelSource(str(file.parent), options | {"gguf_file": file.name})
    if file.is_file():
        raise ModelLoadError(
            f"{path!r} is a file: --{what}-path takes a {what}'s folder, such as {str(file.parent)!r}, or a .gguf file"
        )
    if not file.is_dir():
        if path.startswith(("/", "./", "../", "~")):
            raise ModelLoadError(f"there is no folder {path!r}")
        _check_hub(path, what)
    return ModelSource(str(file) if path.startswith("~") else path, options)


def _check_hub(name: str, what: str) -> None:
    """Ask the hub for a model once. Its library would ask for each file six times, which takes a minute."""
    try:
        if constants.HF_HUB_OFFLINE or try_to_load_from_cache(name, "config.json") is not None:
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT)
    except HFValidationError:
        reason = "there is no such folder, and it cannot be a hub name either"
    except GatedRepoError:
        reason = "its owner decides who may download it: ask for access on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "there is no such folder, and no such name on the hub; private models need HF_TOKEN"
    except HfHubHTTPError as error:
        reason = f"the hub refuses it: {_first_line(error)}"
    # The library's HTTP client, and with it the type of its errors, depends on its version.
    except Exception as error:  # noqa: BLE001  # boundary: third-party code
        reason = f"there is no such folder, and {constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    else:
        return
    raise ModelLoadError(f"cannot load the {what} {name!r}: {reason}")


def find_device(name: str) -> torch.device:
    """Return the device of `--device`.

    Raises:
        ModelLoadError: this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        usable = ", ".join(["auto", "cpu", *gpus])
        raise ModelLoadError(f"cannot use --device {name}: {_first_line(error)} (usable here: {usable})") from error
    return device


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".:")
