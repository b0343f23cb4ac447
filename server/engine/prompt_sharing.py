"""Prompt sharing: the prompt of a request is computed once, and copied to its other continuations.

While a sequence of the request computes the prompt, the others wait; then they get copies of the keys and values of all
but its last token. Each sequence computes the last token itself, because the first output token is sampled from its
logits.

Guarantees:
* Of the running sequences that need a request's prompt, the first computes it. If it ends early, the next one takes
  over, so no sequence waits for one that does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from logitship.server.model.kv_cache import SlotCache
from logitship.server.requests.sequence import Sequence


def share_prompts(running: Iterable[Sequence], cache: SlotCache) -> None:
    """Copy each computed prompt to the sequences of its request that need it.

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
    """Yield the sequences that compute prompt tokens themselves, in order; the others wait, or are done.

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
