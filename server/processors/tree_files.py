"""Loads the operator's token trees, before the model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree
from logitship.server.config import ServerConfig
from logitship.server.refusals import StartError

logger = logging.getLogger(__name__)


def load_trees(config: ServerConfig) -> dict[str, TokenTree]:
    """Load the trees that requests can name, and the one that all requests follow, if it is set.

    RTP-LLM looks for the latter next to the model, logs an error if it cannot read it, and serves without it. Here it
    may also be anywhere else, and a file that cannot be read stops the start: the output of a server without its tree
    looks valid.

    Raises:
        StartError: a file cannot be read, or is not a tree.
    """
    trees = {name: _load("tree", file, [Path(file)]) for name, file in config.named_trees.items()}
    shared = config.tree_decode_config
    if shared:
        # An absolute path stays the same in any folder.
        folders = [config.model_path] if Path(config.model_path).is_dir() and not Path(shared).is_absolute() else []
        trees[shared] = _load(
            "tree_decode_config", shared, [*(Path(folder, shared) for folder in folders), Path(shared)]
        )
    return trees


def _load(setting: str, file: str, candidates: list[Path]) -> TokenTree:
    """Read the tree at the first path where there is a file."""
    path = candidates[-1]
    try:
        path = next((path for path in candidates if path.exists()), path)
        tree = load_tree(path)
    except OSError as error:
        tried = "; tried " + " and ".join(map(str, candidates)) if len(candidates) > 1 else ""
        raise StartError(f"{setting}: {file} cannot be read: {error.strerror}{tried}") from error
    except TreeFormatError as error:
        raise StartError(f"{setting}: {path} holds no tree: {error}") from error
    logger.info("loaded the tree %s of %d paths", path, len(tree))
    return tree
