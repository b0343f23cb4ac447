"""The continuations of one request have one prompt: it is computed once, and copied to the others.

A sequence that still needs a prompt which another sequence of its request is computing waits for it, and then takes the
keys and values of all but its last token. The last one is computed by each sequence itself: its logits are what the
first token is drawn from.

Guarantees:
* Among the running sequences that need one request's prompt, the first computes it. So if a sequence ends early, the
  next takes over, and nobody waits for who does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from logitship.server.model.kv_cache import SlotCache
from logitship.server.requests.sequence import Sequence


def share_prompts(running: Iterable[Sequence], cache: SlotCache) -> None:
    """Copy each prompt that is in the cache to the sequences of its request that need it.

    Args:
        running: sequences that have slots.
        cache: where the slots are.
    """
    running = list(running)
    needing = [sequence for sequence in running if sequence.needs_prompt]
    if not needing:
        return
    sources = {sequence.request_key: sequence for sequence in running if not sequence.needs_prompt}
    for sequence in needing:
        source = sources.get(sequence.request_key)
        if source is not None:
            assert source.slot is not None
            assert sequence.slot is not None
            cache.copy(source.slot, sequence.slot, sequence.num_prompt - 1)
            sequence.take_prompt(source)


def computing_prompts(running: Iterable[Sequence]) -> Iterator[Sequence]:
    """The sequences that compute tokens of their prompts themselves, in order; the others wait, or are done.

    Args:
        running: sequences that have slots, after `share_prompts`.
    """
    taken: set[tuple[str, str]] = set()
    for sequence in running:
        if sequence.needs_prompt:
            if sequence.request_key in taken:
                continue
            taken.add(sequence.request_key)
        if sequence.prefilling:
            yield sequence
