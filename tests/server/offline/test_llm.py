from __future__ import annotations

import dataclasses
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams
from tests.helpers.offline import FOREVER, GREEDY, count_up, quiet, tokens

MakeLLM = Callable[..., LLM]


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    """An `LLM` of the test's own: some interrupt it."""
    return make_llm()


def test_prompt_formats_are_equivalent(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    (expected,) = tokens(quiet(llm, "hello", GREEDY))
    for prompt in ("hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}):
        assert tokens(quiet(llm, prompt, GREEDY)) == [expected]
        assert tokens(quiet(llm, [prompt, prompt], GREEDY)) == [expected, expected]


def test_outputs_are_in_prompt_order(llm: LLM) -> None:
    """Prompts finish in another order."""
    prompts = [f"prompt {number}" for number in range(12)]
    lengths = [(5 * number) % 12 + 1 for number in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    alone = [tokens(quiet(llm, *each))[0] for each in zip(prompts, params, strict=True)]
    outputs = quiet(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert tokens(outputs) == alone
    assert [len(token_ids) for token_ids in alone] == lengths
    assert len({output.request_id for output in outputs}) == 12


def test_thinking_token_budget(make_llm: MakeLLM) -> None:
    llm = make_llm(reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"})
    budgets = [SamplingParams(temperature=0, max_tokens=4, thinking_token_budget=budget) for budget in (0, 7, None)]
    ended, later, never = tokens(quiet(llm, ["<think>hello"] * 3, budgets))
    assert (ended[0], later[2], 3 in never) == (3, 3, False)
    with pytest.raises(InvalidRequest, match="thinking_token_budget: this server does not know"):
        quiet(make_llm(), "hello", SamplingParams(thinking_token_budget=5))


def test_empty_list_of_prompts(llm: LLM) -> None:
    assert quiet(llm, []) == []


def test_default_sampling_params(llm: LLM) -> None:
    (output,) = quiet(llm, "hello")
    assert len(output.outputs) == 1
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_output_ends_at_model_length(llm: LLM) -> None:
    (output,) = quiet(llm, [5] * 500, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_sglang_names(llm: LLM) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    (expected,) = tokens(quiet(llm, "hello", GREEDY))
    assert tokens(quiet(llm, "hello", params)) == [expected]
    without = {"custom_logit_processor": "disallowed_tokens", "custom_params": {"token_ids": expected}}
    assert set(expected).isdisjoint(tokens(quiet(llm, "hello", {**params, **without}))[0])


def test_n_and_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (first,) = quiet(llm, "hello", params)
    (second,) = quiet(llm, "hello", params)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in first.outputs}) > 1
    assert first.outputs == second.outputs


def test_bad_words(llm: LLM) -> None:
    (token_id,) = set(tokens(quiet(llm, "hello", GREEDY))[0][:1])
    word = llm.get_tokenizer().decode([token_id])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bad_words=word)
    assert token_id not in tokens(quiet(llm, "hello", params))[0]


def test_bad_words_as_token_ids(llm: LLM) -> None:
    first = tokens(quiet(llm, "hello", GREEDY))[0][0]
    by_text = dataclasses.replace(GREEDY, bad_words=[llm.get_tokenizer().decode([first])])
    second = tokens(quiet(llm, "hello", by_text))[0][0]
    both = dataclasses.replace(by_text, bad_words_token_ids=[[second]])
    assert not {first, second} & set(tokens(quiet(llm, "hello", both))[0])
    with pytest.raises(InvalidRequest, match=r"^bad_words_token_ids: "):
        quiet(llm, "hello", dataclasses.replace(GREEDY, bad_words_token_ids=[[100000]]))


def test_more_prompts_than_queue_capacity(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2, max_queued_requests=1)
    prompts = [[10 + number] for number in range(20)]
    params = SamplingParams(max_tokens=3, n=2, logits_processors=[count_up])
    outputs = quiet(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(completion.token_ids == [100, 101, 102] for output in outputs for completion in output.outputs)


def test_threads_share_llm(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2, max_queued_requests=0)
    (expected,) = tokens(quiet(llm, "hello", GREEDY))
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(tokens(quiet(llm, ["hello"] * 5, GREEDY)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[expected] * 5] * 4


def test_too_many_continuations_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2, max_queued_requests=1)
    with pytest.raises(InvalidRequest, match="n: asks for 4 continuations, this engine takes at most 3") as caught:
        quiet(llm, "hello", SamplingParams(n=4))
    assert caught.value.param == "n"


async def test_works_inside_running_event_loop(llm: LLM) -> None:
    assert tokens(quiet(llm, "hello", GREEDY)) == tokens(quiet(llm, "hello", GREEDY))


# --- interruption and shutdown ---


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_llm_works_after_ctrl_c(llm: LLM, assert_idle: Callable[[LLM], None]) -> None:
    """Send the signal while the main thread waits for the engine."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 3:
            signal.pthread_kill(main, signal.SIGINT)
        return logits

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logits_processors=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        quiet(llm, ["a", "b"], [params, FOREVER])
    assert_idle(llm)


def test_progress_bar_error_cancels_call(llm: LLM, assert_idle: Callable[[LLM], None]) -> None:
    class Broken:
        def __init__(self, **_: Any) -> None:
            self.closed = False

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            raise OSError("no terminal")

        def close(self) -> None:
            self.closed = True

    bars: list[Broken] = []

    def make_bar(**options: Any) -> Broken:
        bars.append(Broken(**options))
        return bars[-1]

    with pytest.raises(OSError, match="no terminal"):
        llm.generate(["a", "b"], [GREEDY, FOREVER], use_tqdm=make_bar)
    assert bars[0].closed
    assert_idle(llm)


def test_shutdown_ends_call_of_another_thread(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1, max_queued_requests=0)
    running = threading.Event()

    def signal_start(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        running.set()
        return logits

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logits_processors=[signal_start])
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            quiet(llm, ["a", "b", "c"], params)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert running.wait(60)
    llm.shutdown()
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(errors) == 1
    with pytest.raises(RuntimeError, match="this LLM was shut down"):
        llm.generate("a")
    with pytest.raises(RuntimeError, match="this LLM was shut down"):
        llm.chat([{"role": "user", "content": "a"}])
    llm.shutdown()


def test_stop_of_engine_that_cannot_abort_is_runtime_error(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop an engine that takes a request too late to abort it."""
    llm = make_llm()
    running, stopping = threading.Event(), threading.Event()
    monkeypatch.setattr(llm._engine, "_abort_where", lambda matches: stopping.set())

    def wait_for_stop(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        running.set()
        assert stopping.wait(60)
        return logits

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logits_processors=[wait_for_stop])
    with ThreadPoolExecutor() as threads:
        call = threads.submit(quiet, llm, ["a"], params)
        assert running.wait(60)
        llm._engine.stop()
        with pytest.raises(RuntimeError, match="this object was shut down while the request ran"):
            call.result(60)


def own_threads(llm: LLM) -> list[threading.Thread]:
    return [llm._loop_thread._thread, llm._engine._thread._thread]


def test_context_manager_shuts_down(make_engine: Callable[..., AsyncEngine]) -> None:
    with LLM._from_engine(make_engine()) as llm:
        threads = own_threads(llm)
        assert [thread.is_alive() for thread in threads] == [True, True]
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_garbage_collection_ends_threads(make_engine: Callable[..., AsyncEngine]) -> None:
    llm = LLM._from_engine(make_engine())
    quiet(llm, ["a", "b"], GREEDY)
    threads, reference = own_threads(llm), weakref.ref(llm)
    del llm
    gc.collect()
    assert reference() is None
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_garbage_collection_on_engine_thread(make_engine: Callable[..., AsyncEngine]) -> None:
    """The engine's thread cannot join itself."""
    llm = LLM._from_engine(make_engine())
    threads = own_threads(llm)
    holder = [llm]
    del llm

    def collect(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        holder.clear()
        return logits

    other = LLM._from_engine(holder[0]._engine)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logits_processors=[collect])
    quiet(other, "a", params)
    with pytest.raises(RuntimeError, match="shutting down"):
        quiet(other, "a", GREEDY)
    other.shutdown()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
