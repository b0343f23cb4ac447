"""Accounts for the time that each tenant's processors take, and limits how long sequences wait for others' work.

Running sequences may sit a step out because of that: they keep slot and state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from logitship.sampler.cgroup_limits import num_cores
from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.processors.processor_groups import uses_of
from logitship.server.requests.sequence import Sequence

from .decode_shares import DecodeShares
from .forward_pass import positions

WINDOW = 10.0
"""Seconds after which a call counts for 1/e of its time."""

PROCESSOR_WAIT = 0.2
"""Longest wait of a step for processors while other sequences run, as a fraction of the step time without them."""

MIN_WAIT = 0.01
"""Minimum seconds that a step waits, because a step of a small model is shorter than a sandbox's round trip."""

PROMPT_SHARE = 1.5
"""Longest time for the prompts of a step, as a multiple of what its decoding sequences take: stall-free batching, as in
Sarathi-Serve (arXiv 2403.02310). With less, streams are smoother, and fewer sequences decode together, which costs a
tenant throughput: with 16 prompts of 300 tokens and 100 output tokens at a time 2 % at 1.5, 4 % at 1 and 25 % at
0.5."""

SHARED_PROMPT_SHARE = 0.5
"""The same while several tenants run. If no sequence decodes in the step, prompts may take as long as a usual step and
this share of it."""

SHARED_FOR = 1.0
"""Seconds for which a tenant that is alone again has the share of several: the next request of another would wait for
the end of a step with many prompt tokens."""

PROMPT_BLOCK = 16
"""The limit of a step's prompt tokens by their time is a multiple of this, and at least as many. A smaller
`--chunked-prefill-size` is the limit then, too."""

MIN_FORCED = 4
"""Forced tokens of a step, at least, unless its prompts are as many as it may compute."""

_STEP_WEIGHT = 1 / 8


@dataclass
class _Use:
    """Recent use of a tenant.

    Attributes:
        amount: seconds, those of the past with their weight.
        at: time of the last change.
    """

    amount: float
    at: float

    def add(self, amount: float, now: float) -> None:
        """Add to the amount."""
        self.amount, self.at = self.at_time(now) + amount, now

    def at_time(self, now: float) -> float:
        """Return the amount with its weight at a later time."""
        return self.amount * math.exp((self.at - now) / WINDOW)


def _follow(average: float, value: float) -> float:
    """Return the moving average after another value; 0 is no average."""
    return average + _STEP_WEIGHT * (value - average) if average else value


class TenantShares:
    """Fair shares of the engine's time. Implements `StepPatience`.

    A tenant's share is the time of its processors' calls, divided by the time that all cores have, over the last
    seconds. It grows only while sequences of other tenants run: a single tenant may use everything. A tenant is *over
    its share* if its share exceeds `most`: no step waits for its calls, its sequences with shipped processors sit out
    while others can run, and its new requests with shipped processors are refused.

    On the engine thread, except for `others_run`, `retry_after` and `totals`.

    Args:
        most: most of the time that a tenant's processors may take, above 0.
        cores: number of cores; None: those that this process may use.
        clock: returns seconds.
        processor_wait: how long a step waits for processors, as a part of what it takes without them.
        decode: see the attribute.

    Attributes:
        seconds: total time of the calls of each tenant's processors.
        is_shared: True if several tenants have running sequences in this step.
        was_shared: True if that is so, or was so in the last second.
        is_limited: True if several sequences run in this step.
        decode: the shares of decoding sequences.
    """

    def __init__(
        self,
        most: float = 1.0,
        cores: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        processor_wait: float = PROCESSOR_WAIT,
        decode: DecodeShares | None = None,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.is_shared = self.was_shared = self.is_limited = False
        self._shared_at = -math.inf
        self.decode = decode or DecodeShares()
        self._num_running = 0
        self._processor_wait = processor_wait
        self._most = most
        self._cores = cores or num_cores()
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self._running: frozenset[str] = frozenset()
        self._usual_step = 0.0
        self._prompt_seconds = self._prompt_tokens = 0.0
        """Moving averages over the steps with prompts: the time that they added, and their number of tokens."""
        self._prompt_turns: dict[str, int] = {}
        """Number of the last division of prompt tokens in which each tenant got some."""
        self._turn = 0
        self._wait_until: float | None = None

    def begin_step(self, tenants: Collection[str]) -> None:
        """Begin a step.

        Args:
            tenants: the tenant of each running sequence.
        """
        self._running = frozenset(tenants)
        self._num_running = len(tenants)
        self.is_shared = len(self._running) > 1
        now = self._clock()
        if self.is_shared:
            self._shared_at = now
        self.was_shared = now - self._shared_at < SHARED_FOR
        self.is_limited = len(tenants) > 1 and self._processor_wait < math.inf
        self._wait_until = None

    def observe_step(self, seconds: float, num_prompt_tokens: int = 0, num_positions: int = 0) -> None:
        """Record what a step took, without the time for processors.

        Args:
            seconds: duration of the step.
            num_prompt_tokens: prompt tokens that it computed; see `Plan.prompt_cost`.
            num_positions: what its decoding sequences cost, see `positions`.
        """
        if num_prompt_tokens == 0:
            self._usual_step = _follow(self._usual_step, seconds)
            self.decode.time.observe(num_positions, seconds)
        elif num_positions == 0 or self.decode.time.base:
            # Do not subtract `_usual_step`: that step may have had more decoding sequences, and it may have been long
            # ago if every step has prompts.
            without = self.decode.time.expected(num_positions)
            self._prompt_seconds += _STEP_WEIGHT * (max(0.0, seconds - without) - self._prompt_seconds)
            self._prompt_tokens += _STEP_WEIGHT * (num_prompt_tokens - self._prompt_tokens)

    @property
    def _prompt_token(self) -> float:
        """Seconds that a prompt token takes; 0 if that is unknown.

        Long chunks weigh more: short prompts may take no time that can be measured, and after many of them, several
        long chunks would have to stall a step each before their cost is known.
        """
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0

    def num_prompt_tokens(self, most: int, num_positions: int) -> int:
        """Return how many prompt tokens a step may compute.

        Beside decoding sequences, they may take `PROMPT_SHARE` times as long as these, or `SHARED_PROMPT_SHARE` times
        while several tenants run and for a second after. If nothing decodes, they are only limited for several tenants.

        Args:
            most: the limit where nothing decodes.
            num_positions: what the decoding sequences of the step cost, see `positions`; 0 if nothing decodes.
        """
        if not self._prompt_token or not (num_positions or self.was_shared):
            return most
        if num_positions:
            share = SHARED_PROMPT_SHARE if self.was_shared else PROMPT_SHARE
            seconds = share * self.decode.time.expected(num_positions)
        else:
            seconds = (1 + SHARED_PROMPT_SHARE) * self._usual_step
        affordable = int(seconds / self._prompt_token)
        return min(most, max(PROMPT_BLOCK, affordable // PROMPT_BLOCK * PROMPT_BLOCK))

    def num_forced_tokens(self, most: int, num_prompt_tokens: int, num_positions: int) -> int:
        """Return how many forced tokens a step may compute: what its prompts and its decoding sequences have left.

        A few of them are computed even if its decoding sequences have left nothing.

        Args:
            most: the limit for both kinds of tokens where nothing decodes.
            num_prompt_tokens: prompt tokens of the step.
            num_positions: as for `num_prompt_tokens`.
        """
        left = self.num_prompt_tokens(most, num_positions) - num_prompt_tokens
        if self.is_shared and self._prompt_token:
            left = min(left, max(MIN_FORCED, int(self.decode.left / self._prompt_token)))
        return max(0, left)

    def prompt_seconds(self, sequences: Collection[Sequence]) -> float:
        """Return about how long the prompts of these sequences will take in the next step."""
        wanted = sum(one.num_prompt - one.num_computed for one in sequences if one.prefilling)
        decoding = positions(one for one in sequences if not one.prefilling)
        return self._prompt_token * self.num_prompt_tokens(wanted, decoding)

    def split_prompt_tokens(self, budget: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """Divide the prompt tokens of a step between tenants. Each gets as many, or all that it wants.

        If there is no block for each of them, tenants that got none for the most steps are first. The number of tokens
        that a tenant got before makes no difference. Otherwise, a short prompt of a tenant that has been alone would
        wait until a new tenant with long prompts has had as many.

        Args:
            budget: most tokens of the step.
            wanted: prompt tokens of each tenant that are not computed yet.
        """
        given = dict.fromkeys(wanted, 0)
        wanting = sorted(wanted, key=lambda tenant: self._prompt_turns.get(tenant, 0))
        least = PROMPT_BLOCK
        while budget and wanting:
            part = max(least, budget // len(wanting))
            for tenant in wanting:
                tokens = min(part, wanted[tenant] - given[tenant], budget)
                given[tenant] += tokens
                budget -= tokens
            wanting = [tenant for tenant in wanting if given[tenant] < wanted[tenant]]
            least = 1  # what the others have left
        self._turn += 1
        self._prompt_turns.update((tenant, self._turn) for tenant, tokens in given.items() if tokens)
        return given

    def left(self, tenant: str, num_rows: int = 1) -> float:
        """See `StepPatience.left`."""
        if not self.is_limited or num_rows >= self._num_running:
            return math.inf
        if self.is_shared and self.is_over(tenant):
            return 0.0
        now = self._clock()
        if self._wait_until is None:
            self._wait_until = now + max(MIN_WAIT, self._processor_wait * self._usual_step)
        return max(0.0, self._wait_until - now)

    def charge(self, tenant: str, seconds: float) -> None:
        """See `StepPatience.charge`."""
        self.seconds[tenant] = self.seconds.get(tenant, 0.0) + seconds
        if self.is_shared:
            self._uses.setdefault(tenant, _Use(0.0, 0.0)).add(seconds, self._clock())

    def share(self, tenant: str) -> float:
        """Return a tenant's current share: 1 if its processors kept all cores busy in the last seconds."""
        use = self._uses.get(tenant)
        if use is None:
            return 0.0
        return use.at_time(self._clock()) / (WINDOW * self._cores)

    def is_over(self, tenant: str) -> bool:
        """Return whether a tenant's processors have taken more than their share."""
        return tenant in self._uses and self.share(tenant) > self._most

    def others_run(self, tenant: str) -> bool:
        """Return whether other tenants have running sequences. Any thread."""
        return not self._running <= {tenant}

    def retry_after(self, tenant: str) -> int | None:
        """Return after how many seconds a tenant over its share should try again; None if it is not. Any thread."""
        if not self.others_run(tenant) or not self.is_over(tenant):
            return None
        return max(1, math.ceil(WINDOW * math.log(self.share(tenant) / self._most)))

    def totals(self, most_tenants: int) -> Mapping[str, float]:
        """Return `seconds` for metrics: the first tenants, and the rest together as `other`. Any thread."""
        totals = dict(self.seconds)
        first = dict(list(totals.items())[:most_tenants])
        rest = sum(seconds for tenant, seconds in totals.items() if tenant not in first)
        return first if len(first) == len(totals) else {**first, "other": rest}


class StepSelection:
    """Leaves out sequences that wait for a deferred call, and those of tenants over their share while others can run.

    Guarantees:
    * The sequences of one request compute their prompt together, unless they have different processors.
    * If any sequence waits for no call, some sequence takes part.
    """

    def __init__(self, deferred: DeferredCalls, shares: TenantShares) -> None:
        self._deferred = deferred
        self._shares = shares

    def __call__(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences that take part in the next step, in the same order."""
        self._shares.begin_step([sequence.tenant for sequence in running])
        ready = running
        if self._deferred:
            ready = [one for one in running if not self._deferred.any_busy(uses_of(one.sampling_params))]
        if not self._shares.is_shared:
            return ready
        over = {tenant for tenant in {one.tenant for one in ready} if self._shares.is_over(tenant)}
        if over:
            ready = [one for one in ready if one.tenant not in over or not _ships(one)] or ready
        return self._shares.decode.select(ready, self._shares.prompt_seconds(ready))


def _ships(sequence: Sequence) -> bool:
    return any(not use.processor.is_trusted for use in uses_of(sequence.sampling_params))
