"""The trees of tokens that the operator names, read before the model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.server.config import ServerConfig
from logitship.server.refusals import StartError
from logitship.server.requests.messages import ProcessorRequest

logger = logging.getLogger(__name__)


def load_trees(config: ServerConfig) -> dict[str, TokenTree]:
    """The trees that requests can ask for, by name; among them the one that all requests follow, if there is one.

    RTP-LLM looks for that one beside the model, logs an error if it cannot read it, and serves without. Here a file
    that is not beside the model may lie anywhere else, and one that cannot be read stops the start: what comes out of a
    server without its tree looks like an answer.

    Raises:
        StartError: a file cannot be read, or holds no tree.
    """
    trees = {name: _load("tree", file, [Path(file)]) for name, file in config.named_trees.items()}
    everyones = config.tree_decode_config
    if everyones:
        beside_model = [Path(config.model_path, everyones)] if Path(config.model_path).is_dir() else []
        trees[everyones] = _load("tree_decode_config", everyones, [*beside_model, Path(everyones)])
    return trees


def attached_to_all(config: ServerConfig) -> tuple[ProcessorRequest, ...]:
    """What every request carries beside its own processors: the tree that all requests follow."""
    if not config.tree_decode_config:
        return ()
    params = {"tree": config.tree_decode_config}
    return (ProcessorRequest(InstalledProcessor(TreeLogitsProcessor.name), params, own=True),)


def _load(setting: str, file: str, places: list[Path]) -> TokenTree:
    """Read the tree at the first of some places where there is a file."""
    place = next((place for place in places if place.exists()), places[-1])
    try:
        tree = load_tree(place)
    except OSError as error:
        tried = "; tried " + " and ".join(map(str, places)) if len(places) > 1 else ""
        raise StartError(f"{setting}: {file} cannot be read: {error.strerror}{tried}") from error
    except TreeFormatError as error:
        raise StartError(f"{setting}: {place} holds no tree: {error}") from error
    logger.info("loaded the tree %s of %d paths", place, len(tree))
    return tree
