"""The requests in vLLM's slots that carry processors, for its model runner V2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class SlotRequest:
    """A request that carries processors, from its first step to its last.

    Attributes:
        params: vLLM's `SamplingParams`.
        slot: where it is in the buffers. Another one after it was put aside.
        num_prompt_tokens: length of its prompt.
        prefill_len: tokens that are computed before one is drawn: the prompt, and the output so far of a request that
            was put aside.
        prompt_token_ids: its prompt; empty until it is read.
        output_token_ids: its output. Always the same list, which grows.
        prompt_is_token_ids: None: all of it is.
        trouble: why it cannot go on, if so.
    """

    req_id: str
    params: Any
    slot: int
    num_prompt_tokens: int
    prefill_len: int
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    prompt_is_token_ids: None = None
    trouble: str | None = None

    @property
    def num_known(self) -> int:
        """How many of its tokens were read."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def take(self, token_ids: list[int]) -> None:
        """Take over tokens that follow those known."""
        missing = self.num_prompt_tokens - len(self.prompt_token_ids)
        self.prompt_token_ids += token_ids[:missing]
        self.output_token_ids += token_ids[missing:]


class SlotRequests:
    """The requests that carry processors, by id. It tells `ShippedBatch` what `BatchRequests` tells it under V1."""

    def __init__(self) -> None:
        self._by_id: dict[str, SlotRequest] = {}
        self._by_output: dict[int, SlotRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, req_id: str) -> SlotRequest | None:
        """The request of this id."""
        return self._by_id.get(req_id)

    def add(self, request: SlotRequest) -> None:
        """Take in a request, in place of one of the same id."""
        self.remove(request.req_id)
        self._by_id[request.req_id] = request
        self._by_output[id(request.output_token_ids)] = request

    def remove(self, req_id: str) -> SlotRequest | None:
        """Forget the request of this id, if there is one."""
        request = self._by_id.pop(req_id, None)
        if request is not None:
            del self._by_output[id(request.output_token_ids)]
        return request

    def request_of(self, output_token_ids: list[int]) -> SlotRequest:
        """See `BatchRequests.request_of`."""
        return self._by_output[id(output_token_ids)]

    def is_unfinished(self, request: SlotRequest) -> bool:
        """See `BatchRequests.is_unfinished`."""
        return self._by_id.get(request.req_id) is request

    def without_a_token(self, num_rows: int) -> set[int]:
        """None: `SlotBatch` leaves such rows out itself."""
        return set()
