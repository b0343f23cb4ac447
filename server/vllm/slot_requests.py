"""The requests with processors in vLLM's slots, for its model runner V2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class SlotRequest:
    """A request with processors, from its first step to its last.

    Attributes:
        params: vLLM's `SamplingParams`.
        slot: its index in the buffers. It changes when the request is preempted and resumes.
        num_prompt_tokens: length of its prompt.
        prefill_len: tokens that are computed before one is sampled: the prompt, and for a request that was preempted
            its output so far.
        prompt_token_ids: its prompt; empty until it is read.
        output_token_ids: its output. Always the same list, which grows.
        prompt_is_token_ids: None: the whole prompt consists of tokens, or there is an `error`.
        error: why it must end; None while it runs.
    """

    req_id: str
    params: Any
    slot: int
    num_prompt_tokens: int
    prefill_len: int
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    prompt_is_token_ids: None = None
    error: str | None = None

    @property
    def num_known(self) -> int:
        """Number of its tokens that were read."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def append(self, token_ids: list[int]) -> None:
        """Append tokens that follow the known ones."""
        missing = self.num_prompt_tokens - len(self.prompt_token_ids)
        self.prompt_token_ids += token_ids[:missing]
        self.output_token_ids += token_ids[missing:]


class SlotRequests:
    """The requests with processors, by id. Implements `RunnerRequests`."""

    def __init__(self) -> None:
        self._by_id: dict[str, SlotRequest] = {}
        self._by_output: dict[int, SlotRequest] = {}

    def find(self, req_id: str) -> SlotRequest | None:
        """Return the request of this id."""
        return self._by_id.get(req_id)

    def add(self, request: SlotRequest) -> None:
        """Add a request. It replaces one of the same id."""
        self.remove(request.req_id)
        self._by_id[request.req_id] = request
        self._by_output[id(request.output_token_ids)] = request

    def remove(self, req_id: str) -> SlotRequest | None:
        """Remove and return the request of this id, if there is one."""
        request = self._by_id.pop(req_id, None)
        if request is not None:
            del self._by_output[id(request.output_token_ids)]
        return request

    def request_of(self, output_token_ids: list[int]) -> SlotRequest:
        """See `RunnerRequests.request_of`."""
        return self._by_output[id(output_token_ids)]

    def is_unfinished(self, request: SlotRequest) -> bool:
        """See `RunnerRequests.is_unfinished`."""
        return self._by_id.get(request.req_id) is request

    def discarded_rows(self, num_rows: int) -> set[int]:
        """Return no rows: `SlotBatch` omits the discarded ones itself."""
        return set()

    def discarded_rows_ahead(self, rows: Iterable[int]) -> set[int]:
        """Return no rows, see `discarded_rows`."""
        return set()
