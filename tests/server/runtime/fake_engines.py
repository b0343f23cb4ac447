"""Fakes of all engines, which run the same requests: for the scenarios of `test_conformance.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.server.engine import build, failures
from logitship.server.refusals import RequestRefused
from logitship.server.runtime.request_fields import read_several
from logitship.server.speculation.ngram_speculation import NGramSpeculation
from logitship.server.transformers.generate_seat import OneRank, ShippedLogitsProcessor, TransformersSettings
from tests.helpers.coroutines import until
from tests.helpers.engine_requests import BuildEngine, request
from tests.server.sglang.fake_sglang import Sglang, SglangDrafts, SglangGrammar, SglangOverlap
from tests.server.vllm.fake_vllm import VllmV1, VllmV1Async, VllmV2, VllmV2Async, VllmV2Drafts

from .early_executor import EarlyExecutor
from .fake_engine import EOS, MAX_ROWS, VOCAB_SIZE, BatchedEngine, FakeEngine, Job, PluginEngine


class Transformers(PluginEngine):
    """Hugging Face `generate()`, which runs one request after the other."""

    begins_early = False
    settings_class = TransformersSettings
    seat: ShippedLogitsProcessor

    def _run(self, jobs: Sequence[Job]) -> dict[str, list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OneRank, "size", self.group.world_size)
            return {job.rid: job.expected if job.first is None else self._generate(job) for job in jobs}

    def _generate(self, job: Job) -> list[int]:
        assert isinstance(self.settings, TransformersSettings)
        ends = [EOS, *job.stop]
        model = SimpleNamespace(
            generation_config=SimpleNamespace(eos_token_id=ends, pad_token_id=None),
            get_output_embeddings=lambda: SimpleNamespace(weight=torch.empty(VOCAB_SIZE, 1)),
        )
        entry = {"processor": json.loads(job.string), "params": job.custom_params}
        with self._own_executor():
            self.seat = ShippedLogitsProcessor(model, None, [entry], settings=self.settings)
        self.seat._runtime._processors = self.processors
        output: list[int] = []
        try:
            while len(output) not in {job.tokens, job.stops_at} and output[-1:] not in [[end] for end in ends]:
                scores = self.seat(torch.tensor([[7] * job.prompt + output]), torch.zeros(1, VOCAB_SIZE))
                output.append(int(scores.argmax()))
        except ProcessorFault as fault:
            self.ends[job.rid] = f"{fault}\n{fault.traceback}"
        self.seat._release()
        self.close_audit_log()
        self.receipts[job.rid] = self.receipts.pop("generate-0", 0)
        return output


class Own(FakeEngine):
    """logitship's own engine on a tiny model. Requests of three tenants wait for each other's calls, or do not."""

    defers = True
    fails_alone = False
    internal_error = failures.INTERNAL_ERROR.message
    vocab_size = 260
    build: BuildEngine
    options: ClassVar[dict[str, Any]] = {}

    def _make(self, settings: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self._executor is not None:
                executor = self._executor
                patch.setattr(build, "make_executor", lambda *_: executor)
            fixed = {"max_num_seqs": MAX_ROWS, "chunked_prefill_size": 4, **self.options}
            self.engine = Own.build(**settings, **fixed)
        self._plain = cache(self._generate_alone)

    @property
    def held(self) -> list[Any]:
        stats = self.engine.stats()
        unfinished = self._executor.unfinished if isinstance(self._executor, EarlyExecutor) else []
        return [*range(stats.running + stats.waiting), *unfinished]

    def expected(self, job: Job) -> list[int]:
        return self._plain(job) if job.first is None else job.expected

    def _generate_alone(self, job: Job) -> list[int]:
        return asyncio.run(self._generate(job, ""))

    def _run(self, jobs: Sequence[Job]) -> dict[str, list[int]]:
        async def run() -> list[list[int]]:
            outputs = await asyncio.gather(*(self._generate(job, str(n % 3)) for n, job in enumerate(jobs)))
            await until(lambda: not self.held)  # cancelled ones end with the next step
            await self._generate(Job("last", None, tokens=1), "")
            return outputs

        return dict(zip((job.rid for job in jobs), asyncio.run(run()), strict=True))

    async def _generate(self, job: Job, tenant: str) -> list[int]:
        """Run a request, and cancel it if it ends for a reason of its client."""
        entry = {"processor": json.loads(job.string), "params": job.custom_params}
        processors = read_several([entry], "this engine", max_processor_size=1 << 20) if job.first is not None else ()
        limits = {"max_tokens": job.tokens, "stop_token_ids": job.stop, "temperature": 0.0}
        wanted = request(job.rid, [7] * job.prompt, processors, tenant=tenant, **limits)
        output: list[int] = []
        try:
            chunks = await self.engine.submit(wanted)
        except RequestRefused as error:
            self.ends[job.rid] = str(error)
            return output
        async for chunk in chunks:
            output += chunk.token_ids
            if chunk.finish_reason is not None and (error := chunk.finish_reason.error) is not None:
                self.ends[job.rid] = f"{error.message}\n{error.traceback}"
            for receipt in chunk.receipts:
                self.receipts[job.rid] = receipt.steps
            if job.stops_at is not None and len(output) >= job.stops_at:
                break
        await chunks.aclose()
        return output[: job.stops_at]


class OwnDrafts(Own):
    """The same with draft tokens."""

    options: ClassVar[dict[str, Any]] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}

    def _run(self, jobs: Sequence[Job]) -> dict[str, list[int]]:
        known = {job.rid: job for job in jobs}

        def drafts(_: Any, decoding: Any) -> dict[Any, list[int]]:
            most = {each: min(4, each.num_missing - 1) for each in decoding if each.rid in known}
            return {each: self._draft(known[each.rid], each.output_token_ids, n)[0][1:] for each, n in most.items()}

        for job in jobs:
            self.expected(job)  # outside of the engine's thread
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NGramSpeculation, "drafts", drafts)
            outputs = super()._run(jobs)
        self.num_accepted = self.engine.stats().accepted
        return outputs


BATCHED: tuple[type[BatchedEngine], ...] = (
    Sglang,
    SglangOverlap,
    SglangGrammar,
    SglangDrafts,
    VllmV1,
    VllmV1Async,
    VllmV2,
    VllmV2Async,
    VllmV2Drafts,
)
EARLY: tuple[type[BatchedEngine], ...] = (Sglang, VllmV1, VllmV2)
"""One of each seat whose calls begin before their logits exist."""
DRAFTING: tuple[type[FakeEngine], ...] = (SglangDrafts, VllmV2Drafts, OwnDrafts)
DEFERRING: tuple[type[BatchedEngine], ...] = (VllmV1, VllmV1Async)
"""Plugins in engines whose requests can sit steps out. logitship's own engine has other tests."""
PLUGINS: tuple[type[PluginEngine], ...] = (*BATCHED, Transformers)
ENGINES: tuple[type[FakeEngine], ...] = (*PLUGINS, Own, OwnDrafts)
