"""Script for vLLM's environment: the plugin for model runner V2 with vLLM's own code, as far as it runs on a CPU.

vLLM's own: the plugin loader, `RequestState` with its slots, and the model runner's `finish_requests`, `add_requests`
and order of rows. Fakes: the buffers, which need an accelerator; the kernels that write tokens into them; and the rest
of the model runner. It prints the sampled tokens as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Set
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
import vllm.v1.worker.gpu.states as states
from packaging.version import Version
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RealRunner
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, build_custom_logits_processors

from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.vllm import plugin_v2

_apply = ShippedProcessors.apply
VOCAB = 64
REACHES_DRAFTS = Version(vllm.__version__) >= Version("0.33")
FAULT = 63
SOURCE = """
from logitship import CustomLogitProcessor

class Sees(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        for row, params in zip(logits, custom_param_list):
            request = params["__req__"]
            calls = request.state["calls"] = request.state.get("calls", 0) + 1
            if calls == params.get("fails_at"):
                raise RuntimeError("as asked")
            row[:] = -float("inf")
            row[10 + calls] = float(sum(request.origin_input_ids) + len(request.output_ids))
        return logits
"""


class Buffer:
    """Fake of `StagedWriteTensor` and `UvaBackedTensor`, in CPU memory."""

    def __init__(self, size: Any, dtype: torch.dtype, **_: Any) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.np = self.gpu.numpy()
        self._staged: list[tuple[int, int, list[int]]] = []

    def stage_write(self, index: int, start: int, values: list[int]) -> None:
        self._staged.append((index, start, values))

    def stage_write_elem(self, index: int, value: int) -> None:
        self._staged.append((index, 0, [value]))

    def apply_write(self) -> None:
        for index, start, values in self._staged:
            row = self.gpu[index : index + 1] if self.gpu.ndim == 1 else self.gpu[index]
            row[start : start + len(values)] = torch.tensor(values, dtype=row.dtype)
        self._staged.clear()

    def copy_to_uva(self) -> None:
        pass


class Ignores:
    """Fake of a part of the model runner that the tests do not use."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class WorkerBase:
    """Fake of vLLM's class of this name, whose methods front ends call."""


class GPUModelRunner(WorkerBase):
    """Fake of vLLM's model runner: its own methods, with the attributes that they need. It is its own worker."""

    add_requests = RealRunner.add_requests
    finish_requests = RealRunner.finish_requests
    _remove_request = RealRunner._remove_request
    is_last_pp_rank = True
    decode_query_len = 1
    pooling_runner = pp_handler = encoder_cache = adaptive_verification = None

    def __init__(self, vllm_config: Any) -> None:
        self.model_state = self.block_tables = self.lora_state = self.prompt_logprobs_worker = Ignores()
        self.req_states = states.RequestState(4, 32, 32, 0, VOCAB, torch.device("cpu"))
        (self.plugin,) = build_custom_logits_processors(
            vllm_config, self.req_states, False, ["logitship.server.vllm:LogitshipLogitsProcessor"]
        )
        self.sampler = self.plugin
        self._computed: dict[str, int] = {}
        self.faults: dict[str, str] = {}
        self.receipts: dict[str, list[Any]] = {}
        self.steps: dict[str, list[int]] = {}

    def step(
        self,
        new: list[Any],
        lengths: dict[str, int],
        finished: Set[str] = frozenset(),
        preempted: Set[str] = frozenset(),
    ) -> list[int]:
        """Run a step, and return the most likely token of each row.

        Args:
            new: requests to add.
            lengths: number of computed tokens of each scheduled request after the step.
            finished: ids of finished requests.
            preempted: ids of preempted requests.
        """
        self._plan(new, lengths, finished, preempted)
        slots = [self.req_states.req_id_to_index[req_id] for req_id in lengths]
        mapping = torch.tensor(slots)
        seq_lens = np.array(list(lengths.values()), dtype=np.int32)
        last = torch.from_numpy(seq_lens).long() - 1
        tokens = self.req_states.all_token_ids.gpu[mapping, last]
        ctx = LogitsContext(
            mapping, mapping, np.array(slots), torch.zeros(len(slots), dtype=torch.int32), tokens, last, seq_lens
        )
        sampled = [tokens[0] for tokens in self._sample([*lengths], [1] * len(slots), ctx)]
        for slot, length, token in zip(slots, seq_lens.tolist(), sampled, strict=True):
            if length == self.req_states.total_len.gpu[slot]:
                self._commit(slot, token)
        return sampled

    def verify(self, drafts: dict[str, list[int]]) -> dict[str, list[int]]:
        """Run a step with draft tokens, and return the tokens that were added to each request.

        A draft token is accepted if it is the most likely one, as vLLM's rejection sampling does with temperature 0.
        """
        states = self.req_states
        slots = [states.req_id_to_index[req_id] for req_id in drafts]
        lengths = {req_id: int(states.total_len.gpu[slot]) for req_id, slot in zip(drafts, slots, strict=True)}
        self._computed |= {req_id: length - 1 for req_id, length in lengths.items()}
        self._plan([], lengths, frozenset(), frozenset())
        rows = [
            (slot, depth, length - 1 + depth, token)
            for slot, (req_id, length) in zip(slots, lengths.items(), strict=True)
            for depth, token in enumerate([int(states.all_token_ids.gpu[slot, length - 1]), *drafts[req_id]])
        ]
        expanded, depths, positions, tokens = torch.tensor(rows).unbind(dim=1)
        bounds = np.array([length + len(drafts[req_id]) for req_id, length in lengths.items()], dtype=np.int32)
        ctx = LogitsContext(
            expanded, torch.tensor(slots), np.array(slots), depths.int(), tokens.int(), positions, bounds
        )
        sampled = self._sample([*drafts], [1 + len(drafted) for drafted in drafts.values()], ctx)
        added: dict[str, list[int]] = {}
        for slot, (req_id, drafted), own in zip(slots, drafts.items(), sampled, strict=True):
            num_accepted = next((n for n, token in enumerate(drafted) if own[n] != token), len(drafted))
            added[req_id] = own[: num_accepted + 1]
            for token in added[req_id]:
                self._commit(slot, token)
            (receipt,) = self.receipts[req_id][len(added[req_id]) - 1]
            self.steps.setdefault(req_id, []).append(receipt["steps"])
        return added

    def sample_tokens(self, req_ids: list[str], counts: list[int], ctx: Any) -> Any:
        """Return a fake of vLLM's output with the most likely tokens, which are copied to the host later."""
        tokens = self.plugin.apply(torch.zeros(sum(counts), VOCAB), ctx).argmax(dim=-1).split(counts)
        index = {req_id: row for row, req_id in enumerate(req_ids)}
        output = ModelRunnerOutput(req_ids=req_ids, req_id_to_index=index)

        def get_output() -> Any:
            output.sampled_token_ids = [each.tolist() for each in tokens]
            return output

        return SimpleNamespace(get_output=get_output)

    def _sample(self, req_ids: list[str], counts: list[int], ctx: Any) -> list[list[int]]:
        output = self.sample_tokens(req_ids, counts, ctx).get_output()
        for req_id, attached in output.prompt_token_id_logprobs_dict.items():
            ending = json.loads(attached.numpy().tobytes())
            if "fault" in ending:
                self.faults[req_id] = ending["fault"]
            else:
                self.receipts[req_id] = ending["receipts"]
        sampled: list[list[int]] = output.sampled_token_ids
        return sampled

    def _commit(self, slot: int, token: int) -> None:
        self.req_states.all_token_ids.gpu[slot, self.req_states.total_len.gpu[slot]] = token
        self.req_states.total_len.gpu[slot] += 1

    def _plan(self, new: list[Any], lengths: dict[str, int], finished: Set[str], preempted: Set[str]) -> None:
        for req_id in finished | preempted:
            del self._computed[req_id]
        computed = self._computed | {each.req_id: each.num_computed_tokens for each in new}
        counts = {req_id: length - computed[req_id] for req_id, length in lengths.items()}
        cached = [req_id for req_id in lengths if req_id in self._computed]
        self._computed |= lengths
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[computed[req_id] for req_id in cached]
            ),
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens={},
            finished_req_ids=finished,
            preempted_req_ids=preempted,
        )
        self.finish_requests(output)
        self.add_requests(output)
        assert sort_batch_req_ids(counts, {}, self.decode_query_len) == list(lengths)


def request(
    req_id: str, prompt: list[int], output: list[int] | None = None, embeds: torch.Tensor | None = None, **params: Any
) -> Any:
    """Return a fake of vLLM's `NewRequestData` with the attributes that are read."""
    xargs = {"custom_logit_processor": json.dumps({"source": SOURCE, "class_name": "Sees"})}
    return SimpleNamespace(
        req_id=req_id,
        prompt_len=len(prompt),
        prompt_embeds=embeds,
        prefill_token_ids=prompt + (output or []),
        num_computed_tokens=0,
        # With a stop string, any output may be the last one.
        sampling_params=SamplingParams(
            max_tokens=20, stop="x", extra_args={**xargs, "custom_params": json.dumps(params)}
        ),
        mm_features=[],
        block_ids=(),
        lora_request=None,
    )


class OneRank:
    """Fake without tensor parallelism: vLLM's groups need its full initialization."""

    is_first = True

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        """Do nothing: there is only one rank."""


def config(
    *, speculative_config: Any = None, is_diffusion: bool = False, async_scheduling: bool = False, **parallel: Any
) -> Any:
    """Return a fake of vLLM's configuration with the attributes that are read."""
    one_rank = {"prefill_context_parallel_size": 1, "enable_batch_sharded_sampling": False}
    model = SimpleNamespace(
        is_diffusion=is_diffusion,
        skip_tokenizer_init=True,
        get_vocab_size=lambda: VOCAB,
        try_get_generation_config=lambda: {"eos_token_id": 0},
        max_model_len=32,
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**one_rank | parallel),
        model_config=model,
        speculative_config=speculative_config,
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling),
        ec_transfer_config=None,
    )


class Changed(GPUModelRunner):
    """The model runner of another vLLM version."""

    def add_requests(self, output: Any) -> None:
        """Has another argument than the plugin expects."""


def refusal(runner: type[GPUModelRunner], vllm_config: Any) -> str:
    """Return the error with which the plugin refuses to start."""
    try:
        runner(vllm_config)
    except ValueError as error:
        return str(error)
    return "it started"


def run(runner: GPUModelRunner) -> list[list[int]]:
    """Run requests with processors: one in two chunks, one preempted and resumed, one that fails."""
    steps = [
        runner.step([request("a", [1, 2, 3, 4]), request("b", [5, 6])], {"a": 2, "b": 2}),
        runner.step([], {"b": 3, "a": 4}),
        runner.step([request("c", [7], fails_at=2)], {"c": 1, "a": 5}, preempted={"b"}),
        runner.step([request("b", [5, 6], [11, 12])], {"a": 6, "c": 2, "b": 4}),
        runner.step([request("d", [8])], {"d": 1, "b": 5}, finished={"a", "c"}),
        runner.step([], {"b": 6, "d": 2}),
    ]
    runner.step([], {"b": 7}, finished={"d"})
    return steps


def run_with_embeddings(runner: GPUModelRunner) -> list[list[int]]:
    """Run a request whose prompt consists of embeddings, beside another one. vLLM's buffers have zeros for them."""
    new = [request("a", [0, 0], embeds=torch.ones(2, 8)), request("b", [5])]
    return [runner.step(new, {"b": 1, "a": 2}), runner.step([], {"b": 2})]


def run_with_drafts(runner: GPUModelRunner) -> list[dict[str, list[int]]]:
    """Run requests with draft tokens: right, wrong, both, none, and after an error behind an accepted one.

    Returns:
        The tokens that were added in each step; and the steps of the receipts after each.
    """
    runner.step([request("a", [1, 2]), request("b", [3])], {"b": 1, "a": 2})
    return [
        runner.verify({"a": [12, 13], "b": [40]}),
        runner.verify({"a": [15, 41, 17], "b": []}),
        runner.verify({"a": [], "b": [14, 15, 16]}),
        runner.verify({"a": [42, 18], "b": [18]}),
        runner.steps,
    ]


def count_early_calls() -> list[int]:
    """Return a list that will contain the number of calls that have begun before each `apply` of processors."""
    counts: list[int] = []

    def apply(self: ShippedProcessors, logits: torch.Tensor) -> torch.Tensor:
        counts.append(len(self.begun_rows))
        return _apply(self, logits)

    ShippedProcessors.apply = apply  # type: ignore[method-assign]
    return counts


def main() -> None:
    """Run the same requests with both kinds of scheduling, and in configurations that are refused."""
    states.StagedWriteTensor = states.UvaBackedTensor = Buffer
    plugin_v2.TensorParallelRanks = OneRank
    refused = [
        refusal(GPUModelRunner, config(speculative_config=SimpleNamespace(rejection_sample_method="synthetic"))),
        refusal(GPUModelRunner, config(is_diffusion=True)),
        refusal(GPUModelRunner, config(prefill_context_parallel_size=2)),
        refusal(GPUModelRunner, config(enable_batch_sharded_sampling=True)),
        refusal(Changed, config()),
    ]
    steps = {}
    for scheduling in ("synchronous", "asynchronous"):
        early = count_early_calls()
        runner = GPUModelRunner(config(async_scheduling=scheduling == "asynchronous"))
        steps[scheduling] = {"tokens": run(runner), "early": early.copy(), "faults": runner.faults}
    embeddings = run_with_embeddings(GPUModelRunner(config()))
    drafts: Any = None
    speculation = SimpleNamespace(rejection_sample_method="standard")
    if REACHES_DRAFTS:
        drafts = run_with_drafts(GPUModelRunner(config(speculative_config=speculation)))
    else:
        drafts = refusal(GPUModelRunner, config(speculative_config=speculation))
    json.dump({"refused": refused, "steps": steps, "embeddings": embeddings, "drafts": drafts}, sys.stdout)


if __name__ == "__main__":
    main()
