"""Limits of the time that a step of another engine than logitship's waits for processors.

A step waits for a late call as long as the allowances of its requests last. Each request has one, and so has each
tenant: a token bucket of seconds, which fills with a share of the engine's own time, up to a burst. If they are used
up, the call continues behind the engine, and its requests sit out until it ends. So other requests lose a share of
their speed, and not seconds.

In an engine whose rows cannot sit a step out, these requests end as too slow, and the call is dropped when it ends. New
requests with its class then wait for a moment, outside of the batch.

A tenant's allowance limits the calls of new classes, and of those whose last call was too slow. A step waits without a
limit if all requests of the last steps belong to the call.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.deferred_calls import DeferredCall, DeferredCalls, EndlessPatience
from logitship.sampler.processors.executor import LoadedProcessor, Run
from logitship.sampler.processors.processor_groups import ProcessorGroup, ProcessorUse
from logitship.server.metrics.engine_stats import MAX_TENANTS, OTHER

BURST = 1.0
"""Seconds that a request or a tenant may use at once: a first call often prepares something."""
MIN_GROWTH = 0.01
"""Seconds by which a request's allowance grows in each step, at least: a call takes a few milliseconds where cores are
busy. A tenant's has no minimum, as it would be most of the time of a fast engine."""
MIN_NEW = 0.05
"""Seconds that a step waits for a call of a new class in any case, if its request has not used up its own allowance."""
MIN_SLOW = 0.01
"""The same for a class whose last call was too slow, and the most if its requests can sit out."""
MIN_START = 0.001
"""Allowance with which the next request of a class starts that was too slow many times."""
PAUSE = 1.0
"""Seconds for which no request begins with a class for which one has ended: its prompt costs the others a step."""
MAX_ABANDONED = 2
"""Calls of a tenant that go on though their requests have ended: a first call may prepare something for the next."""
MAX_STEP = 1.0
"""Longest time between two steps that counts as the engine's own. Without requests, it waits."""
MEMORY = 16
"""Number of steps for which other requests are remembered: an engine may compute prompts in steps of their own."""
_MAX_KNOWN = 4096
"""Number of classes that are remembered as too slow, and of tenants before some are dropped."""


@dataclass
class _Bucket:
    """An allowance.

    Attributes:
        left: seconds, when allowances of its kind had grown by `at`.
        at: seconds.
        used: seconds that steps have waited.
    """

    left: float
    at: float
    used: float = 0.0


class _Limited(EndlessPatience):
    """Tells `ShippedProcessors` that it may have to defer calls, and adds up the time of each tenant's."""

    is_limited = True

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def charge(self, tenant: str, seconds: float) -> None:
        """See `StepPatience.charge`."""
        name = tenant if tenant in self.seconds or len(self.seconds) < MAX_TENANTS else OTHER
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Allowances(DeferredCalls):
    """The calls of an engine that a step does not wait for any longer, and the allowances. Engine thread only.

    Args:
        share: share of the engine's own time that fills the allowances.
        clock: returns seconds.

    Attributes:
        tenant_seconds: total time of the calls of each tenant's processors; after the first tenants, of `OTHER`.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        limited = _Limited()
        super().__init__(limited)
        self.tenant_seconds = limited.seconds
        self._share = share
        self._clock = clock
        self._num_requests = self._num_steps = 0
        self._others_at = -math.inf
        """The last step with requests that waited for other ones."""
        self._growth = self._tenant_growth = 0.0
        """Seconds by which allowances of requests, and of tenants, have grown since the start."""
        self._step_ended: float | None = None
        self._wait_began = 0.0
        self._tenants: dict[str, _Bucket] = {}
        self._most_tenants = _MAX_KNOWN
        """Number of tenants at which those with a full allowance are dropped."""
        self._requests: dict[str, _Bucket] = {}
        self._sat_out: set[str] = set()
        """Requests that have sat a step out: the engine can leave them out."""
        self._starts: dict[str, float] = {}
        """Allowances of new requests with classes that were too slow, by the name of the processor."""
        self._paused_until: dict[str, float] = {}
        """Times until which requests with such classes wait."""

    def begin_apply(self, num_requests: int) -> None:
        """Begin the calls of a step that need its logits.

        Args:
            num_requests: requests of the step, with and without processors, and those that sit it out.
        """
        self._num_requests = num_requests
        self._num_steps += 1
        if self._step_ended is not None:
            own = min(self._clock() - self._step_ended, MAX_STEP)
            self._tenant_growth += self._share * own
            self._growth += max(MIN_GROWTH, self._share * own)

    def plain_step(self) -> None:
        """Record a step without processors."""
        self._num_steps += 1
        self._others_at = self._num_steps

    def end_apply(self) -> None:
        """End the calls of a step."""
        self._step_ended = self._clock()

    def drop(self, rid: str) -> None:
        """Drop the allowance of a request that has ended."""
        self._requests.pop(rid, None)
        self._sat_out.discard(rid)

    def left(self, group: ProcessorGroup) -> float:
        """Return how long the step still waits for a call, in seconds; infinity: until it ends."""
        self._wait_began = self._clock()
        return self._left(_uses(group))

    def ended_in_time(self, group: ProcessorGroup) -> None:
        """Record that a call has ended while the step waited."""
        super().ended_in_time(group)
        self._spend(_uses(group), self._clock() - self._wait_began)
        name = group.processor.group_name
        if name in self._starts:
            self._starts[name] *= 1.1
            if self._starts[name] >= BURST:
                del self._starts[name]
                self._paused_until.pop(name, None)

    def sits_out(self, rid: str) -> None:
        """Record that the engine leaves a request out of its steps until its call ends."""
        self._sat_out.add(rid)

    def is_paused(self, name: str) -> bool:
        """Return whether new requests with a processor wait, because it was too slow a moment ago."""
        return self._paused_until.get(name, -math.inf) > self._clock()

    def add(self, call: DeferredCall) -> None:
        """Take over a call that was too slow."""
        super().add(call)
        self._spend(_uses(call.group), self._clock() - self._wait_began)
        name = call.group.processor.group_name
        if len(self._starts) >= _MAX_KNOWN:
            self._starts.clear()
            self._paused_until.clear()
        self._starts[name] = max(MIN_START, self._starts.get(name, BURST) / 4)

    def begun(self, group: ProcessorGroup, run: Run) -> None:
        """Lower the priority of a call of a class that was too slow."""
        if group.processor.group_name in self._starts:
            run.lower_priority()

    def wait_for(self, uses: Iterable[ProcessorUse]) -> None:
        """Wait for earlier calls of processors, as long as the allowances of the requests that need them last."""
        if not self:
            return
        waiting: dict[str, list[ProcessorUse]] = {}
        for use in uses:
            waiting.setdefault(use.processor.group_name, []).append(use)
        for call in self._calls.copy():
            needed = waiting.get(call.group.processor.group_name)
            if needed is not None:
                began = self._clock()
                if call.run.wait(min(self._left(needed), MAX_STEP)):
                    self._end(call)
                self._spend(needed, self._clock() - began)

    def surplus(self) -> list[LoadedProcessor]:
        """Return the processors of calls whose requests have ended, but for the tenants' latest ones.

        Each takes time from the engine's cores until it is killed for its CPU time.
        """
        count: Counter[str] = Counter()
        found = []
        for call in reversed(self._calls):
            processor = call.group.processor
            if all(owner.executor_row is None for owner in call.owners):
                count[processor.tenant] += 1
                if count[processor.tenant] > MAX_ABANDONED:
                    found.append(processor)
        return found

    def too_slow(self, uses: Sequence[ProcessorUse], setting: str) -> ProcessorFault:
        """Return the fault of a request that a step no longer waits for. New ones with its processors are paused.

        Args:
            uses: the processors of the request.
            setting: the name of the setting of the share.
        """
        use = next((each for each in uses if self.is_busy(each.processor.group_name)), uses[0])
        self._paused_until[use.processor.group_name] = self._clock() + PAUSE
        bucket = self._bucket(use)
        message = (
            f"processor {use.name} is too slow: steps have waited {bucket.used * 1e3:.0f} ms for this request, "
            f"{max(0.0, bucket.left) * 1e3:.0f} ms of its allowance are left, and it grows by {self._share:g} of the "
            f"time that the engine computes ({setting}), at least {MIN_GROWTH * 1e3:.0f} ms a step"
        )
        return ProcessorFault(message, digest=use.processor.digest, name=use.name, kind="too_slow")

    def _left(self, uses: Collection[ProcessorUse]) -> float:
        if self._num_requests > len({use.rid for use in uses}):
            self._others_at = self._num_steps
        if self._num_steps - self._others_at > MEMORY:
            return math.inf
        left = max(_filled(self._bucket(use), self._growth) for use in uses)
        processor = next(iter(uses)).processor
        last = self._last.get(processor.group_name)
        if last is None or last.was_deferred:
            least = MIN_NEW if last is None else MIN_SLOW
            # Another wait gains nothing for a request that can sit out again, and costs the others.
            may_wait = last is None or not self._sat_out.issuperset(use.rid for use in uses)
            left = min(
                left, max(least, _filled(self._tenant(processor.tenant), self._tenant_growth) if may_wait else 0.0)
            )
        return max(0.0, left)

    def _spend(self, uses: Collection[ProcessorUse], seconds: float) -> None:
        rids = {use.rid: use for use in uses}
        spent = [(self._tenant(next(iter(uses)).processor.tenant), self._tenant_growth)]
        spent += [(bucket, self._growth) for bucket in map(self._bucket, rids.values())]
        for bucket, growth in spent:
            bucket.left = _filled(bucket, growth) - seconds
            bucket.used += seconds

    def _bucket(self, use: ProcessorUse) -> _Bucket:
        if use.rid not in self._requests:
            start = self._starts.get(use.processor.group_name, BURST)
            self._requests[use.rid] = _Bucket(start, self._growth)
        return self._requests[use.rid]

    def _tenant(self, tenant: str) -> _Bucket:
        if tenant not in self._tenants and len(self._tenants) >= self._most_tenants:
            # A full one is like that of a new tenant.
            growth = self._tenant_growth
            self._tenants = {name: each for name, each in self._tenants.items() if _filled(each, growth) < BURST}
            self._most_tenants = max(_MAX_KNOWN, 2 * len(self._tenants))
        return self._tenants.setdefault(tenant, _Bucket(BURST, self._tenant_growth))


def _filled(bucket: _Bucket, growth: float) -> float:
    """Return what is left of an allowance, which has grown by `growth` since the start of the engine."""
    bucket.left = min(BURST, bucket.left + growth - bucket.at)
    bucket.at = growth
    return bucket.left


def _uses(group: ProcessorGroup) -> list[ProcessorUse]:
    return group.members
