from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor as HFLogitsProcessor

from logitship import CustomLogitProcessor, LogitshipError, ProcessorFault
from logitship.client.errors import GenerationError
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.offline.errors import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from logitship.server.offline.sampling_params import SamplingParams

MakeLLM = Callable[..., LLM]
Prompts = Any

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FOREVER = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
"""Five hundred steps of the tiny model."""


class Force(CustomLogitProcessor):
    """Makes `token_id` the only token."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[:] = -torch.inf
            row[params["token_id"]] = 0.0
        return logits


class Add(CustomLogitProcessor):
    """Moves the most likely token on by `by`."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[:] = row.roll(params["by"])
        return logits


class Fails(CustomLogitProcessor):
    """Raises at its third token."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        if any(len(params["__req__"].output_ids) == 2 for params in custom_param_list):
            raise ZeroDivisionError("no such luck")
        return logits


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def quiet(llm: LLM, prompts: Prompts, *params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, *params, use_tqdm=False)


def assert_idle(llm: LLM) -> None:
    """Nothing of earlier calls runs. What this call runs comes after the cancellations of earlier ones."""
    assert len(tokens(quiet(llm, "still here", GREEDY))[0]) == 8
    stats = llm._engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


# --- prompts and parameters ---


def test_every_way_to_write_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    (expected,) = tokens(quiet(llm, "hello", GREEDY))
    for prompt in ("hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}):
        assert tokens(quiet(llm, prompt, GREEDY)) == [expected]
        assert tokens(quiet(llm, [prompt, prompt], GREEDY)) == [expected, expected]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """They end in another one."""
    prompts = [f"prompt {number}" for number in range(12)]
    lengths = [(5 * number) % 12 + 1 for number in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    alone = [tokens(quiet(llm, *each))[0] for each in zip(prompts, params, strict=True)]
    outputs = quiet(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert tokens(outputs) == alone
    assert [len(token_ids) for token_ids in alone] == lengths
    assert len({output.request_id for output in outputs}) == 12


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert quiet(llm, []) == []


def test_vllms_defaults(llm: LLM) -> None:
    (output,) = quiet(llm, "hello")
    assert len(output.outputs) == 1
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_an_output_ends_at_the_models_length_whatever_was_asked_for(llm: LLM) -> None:
    (output,) = quiet(llm, [5] * 500, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_sglangs_names(llm: LLM) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    assert tokens(quiet(llm, "hello", params)) == tokens(quiet(llm, "hello", GREEDY))
    forced = {**params, "custom_params": {"token_id": 77}, "custom_logit_processor": Force}
    assert tokens(quiet(llm, "hello", forced)) == [[77] * 8]


def test_n_and_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (first,) = quiet(llm, "hello", params)
    (second,) = quiet(llm, "hello", params)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in first.outputs}) > 1
    assert first.outputs == second.outputs


def test_logprobs_are_vllms_dicts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = quiet(llm, [10, 11, 12], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(table)) for table in completion.logprobs] == completion.token_ids
    chosen = 0.0
    for table, token_id in zip(completion.logprobs, completion.token_ids, strict=True):
        chosen += table[token_id].logprob
        assert len(table) == 2  # greedy: the token is the first of the two most likely
        assert table[token_id].rank == 1
        assert [entry.rank for entry in table.values()] == [1, 2]
        assert table[token_id].decoded_token == llm.get_tokenizer().decode([token_id])
    assert completion.cumulative_logprob == pytest.approx(chosen)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(table)) for table in output.prompt_logprobs[1:] if table] == [11, 12]


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    (output,) = quiet(llm, "hello", GREEDY)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_stop_reasons_are_vllms(llm: LLM) -> None:
    def ended_by(token_id: int, **params: Any) -> tuple[str | None, int | str | None]:
        forced = SamplingParams(custom_logit_processor=Force, custom_params={"token_id": token_id}, **params)
        completion = quiet(llm, "hello", forced)[0].outputs[0]
        return completion.finish_reason, completion.stop_reason

    assert ended_by(1) == ("stop", None)  # the model's own end token
    assert ended_by(1, stop_token_ids=[1]) == ("stop", 1)
    assert ended_by(50, stop_token_ids=[50]) == ("stop", 50)
    text = llm.get_tokenizer().decode([70])
    assert ended_by(70, stop=text * 2) == ("stop", text * 2)
    assert ended_by(50, max_tokens=2) == ("length", None)


def test_bad_words(llm: LLM) -> None:
    (token_id,) = set(tokens(quiet(llm, "hello", GREEDY))[0][:1])
    word = llm.get_tokenizer().decode([token_id])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bad_words=word)
    assert token_id not in tokens(quiet(llm, "hello", params))[0]


# --- processors ---


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one]], ids=["one", "list"])
@pytest.mark.parametrize(
    "form",
    [
        Force,
        Force(),
        Force.to_str(),
        {
            "class_name": "Force",
            "source": "from logitship import CustomLogitProcessor\n"
            "class Force(CustomLogitProcessor):\n"
            "    def __call__(self, logits, custom_param_list=None):\n"
            "        for row, params in zip(logits, custom_param_list):\n"
            "            row[params['token_id']] += 1000\n"
            "        return logits\n",
        },
    ],
    ids=["class", "instance", "string", "source"],
)
def test_a_processor_in_every_form(llm: LLM, form: Any, wrap: Callable[[Any], Any]) -> None:
    params = SamplingParams(max_tokens=4, custom_logit_processor=wrap(form), custom_params={"token_id": 99})
    (output,) = quiet(llm, "hello", params)
    assert output.outputs[0].token_ids == [99] * 4
    assert [(receipt.name, receipt.steps) for receipt in output.receipts] == [("Force", 4)]


def test_an_installed_processor_by_name(llm: LLM) -> None:
    (most_likely, *_) = tokens(quiet(llm, "hello", GREEDY))[0]
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        custom_logit_processor="disallowed_tokens",
        custom_params={"token_ids": [most_likely]},
    )
    assert tokens(quiet(llm, "hello", params)) != [[most_likely]]


def test_the_list_runs_in_order_each_with_its_own_parameters(llm: LLM) -> None:
    entries = [{"processor": Force, "params": {"token_id": 40}}, {"processor": Add, "params": {"by": 2}}]
    assert tokens(quiet(llm, "hello", SamplingParams(max_tokens=2, logits_processors=entries))) == [[42, 42]]
    backwards = SamplingParams(max_tokens=2, logits_processors=entries[::-1])
    assert tokens(quiet(llm, "hello", backwards)) == [[40, 40]]


def test_entries_without_parameters_see_custom_params(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=1,
        custom_params={"token_id": 40},
        logits_processors=[Force, {"processor": Add, "params": {"by": 1}}],
    )
    assert tokens(quiet(llm, "hello", params)) == [[41]]


def count_up(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[100 + len(output_token_ids)] += 1000
    return logits


def repeat_prompt(prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[prompt_token_ids[len(output_token_ids)]] += 1000
    return logits


class ForceLength(HFLogitsProcessor):
    """Forces the number of tokens so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, input_ids.shape[1]] = 0.0
        return forced


@pytest.mark.parametrize(
    ("callable_", "expected"),
    [(count_up, [100, 101, 102]), (repeat_prompt, [10, 11, 12]), (ForceLength(), [3, 4, 5]), (ForceLength, [3, 4, 5])],
    ids=["two parameters", "three parameters", "Hugging Face object", "Hugging Face class"],
)
def test_request_level_callables(llm: LLM, callable_: Any, expected: list[int]) -> None:
    params = SamplingParams(max_tokens=3, logits_processors=[callable_], n=2)
    (output,) = quiet(llm, [10, 11, 12], params)
    assert [completion.token_ids for completion in output.outputs] == [expected, expected]


def test_callables_by_name(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "callables_of_mine.py").write_text(
        "class Forced:\n"
        "    def __init__(self, token_id):\n"
        "        self.token_id = token_id\n"
        "    def __call__(self, output_token_ids, logits):\n"
        "        logits[self.token_id] += 1000\n"
        "        return logits\n"
        "def forced(output_token_ids, logits):\n"
        "    return Forced(60)(output_token_ids, logits)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"qualname": "callables_of_mine.Forced", "args": (50,)}
    assert tokens(quiet(llm, "hello", SamplingParams(max_tokens=2, logits_processors=[entry]))) == [[50, 50]]
    named = SamplingParams(max_tokens=2, logits_processors=["callables_of_mine.forced"])
    assert tokens(quiet(llm, "hello", named)) == [[60, 60]]
    monkeypatch.delitem(sys.modules, "callables_of_mine")


# --- more than fits ---


def test_more_prompts_than_the_queue_takes(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2, max_queued_requests=1)
    prompts = [[10 + number] for number in range(20)]
    params = SamplingParams(max_tokens=3, n=2, logits_processors=[ForceLength])
    outputs = quiet(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(completion.token_ids == [1] for output in outputs for completion in output.outputs)


def test_threads_share_one_llm(make_llm: MakeLLM) -> None:
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


def test_more_continuations_than_ever_fit_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2, max_queued_requests=1)
    with pytest.raises(InvalidRequest, match="n: asks for 4 continuations, this engine takes at most 3") as caught:
        quiet(llm, "hello", SamplingParams(n=4))
    assert caught.value.param == "n"


def test_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def main() -> list[RequestOutput]:
        return quiet(llm, "hello", GREEDY)

    assert tokens(asyncio.run(main())) == tokens(quiet(llm, "hello", GREEDY))


# --- refusals and failures ---


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, InvalidRequest, r"prompts\[1\]: is empty"),
        ([5] * 600, None, InvalidRequest, r"prompts\[1\]: has 600 tokens"),
        ([5, 999], None, InvalidRequest, r"prompts\[1\]: token id 999"),
        ([5, "x"], None, TypeError, r"prompts\[1\]: expected a text or a list of token ids .*, not a list with str"),
        (3.5, None, TypeError, r"prompts\[1\]: expected .* not float"),
        ({"prompt": "x", "multi_modal_data": {}}, None, ValueError, r"prompts\[1\]: 'multi_modal_data' is not supp"),
        ({}, None, ValueError, r"prompts\[1\]: has neither"),
        ("x", SamplingParams(logprobs=21), InvalidRequest, "logprobs: this server gives at most 20"),
        ("x", SamplingParams(min_tokens=600, max_tokens=600), InvalidRequest, "max_tokens: asks for 600 tokens"),
        ("x", SamplingParams(allowed_token_ids=[999]), InvalidRequest, "allowed_token_ids: token id 999"),
        ("x", SamplingParams(bad_words=[" "]), ValueError, "bad_words: must not contain an empty string"),
        ("x", {"temprature": 1}, InvalidRequest, r"sampling_params\[1\].temprature: .* did you mean temperature"),
        ("x", {"regex": "a+"}, InvalidRequest, r"sampling_params\[1\].regex: is not supported"),
        ("x", {"max_new_tokens": 600, "min_new_tokens": 600}, InvalidRequest, r"\[1\].max_new_tokens: asks for 600"),
        ("x", "greedy", TypeError, r"sampling_params\[1\]: expected logitship.SamplingParams or a dict, not str"),
        ("x", SamplingParams(custom_logit_processor=3), TypeError, "custom_logit_processor: expected a CustomLogit"),
        ("x", SamplingParams(custom_logit_processor="{"), InvalidRequest, "custom_logit_processor: .* not JSON"),
        ("x", SamplingParams(logits_processors=[3]), TypeError, r"logits_processors\[0\]: expected .* not int"),
        ("x", SamplingParams(logits_processors=[{"params": {}}]), InvalidRequest, r"_processors\[0\]: has neither"),
    ],
)  # fmt: skip
def test_a_mistake_in_one_prompt_is_seen_before_any_runs(
    llm: LLM, prompt: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quiet(llm, ["hello", prompt], [GREEDY, GREEDY if params is None else params])
    assert llm._engine.stats().steps == 0
    assert_idle(llm)


def test_as_many_sampling_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params: has 1 entries for 2 prompts"):
        quiet(llm, ["a", "b"], [GREEDY])


def test_a_refusal_says_which_prompt_it_is_about(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens") as caught:
        quiet(llm, ["x", [5] * 500], SamplingParams(min_tokens=100, max_tokens=100))
    assert caught.value.__notes__ == ["in prompts[1]"]
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(custom_logit_processor="no_such_processor"), r"custom_logit_processor: .*no_such_processor"),
        (
            SamplingParams(logits_processors=[{"processor": {"class_name": "A", "source": "import"}}]),
            r"logits_processors\[0\]: ",
        ),
        (SamplingParams(logits_processors=["no.such.callable"]), r"logits_processors\[0\]: .*no\.such\.callable"),
    ],
)
def test_a_processor_that_does_not_load_is_refused(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        quiet(llm, ["a", "b"], params)
    assert llm._engine.stats().steps == 0
    assert_idle(llm)


def test_a_fault_is_typed_and_cancels_the_others(llm: LLM) -> None:
    fails = SamplingParams(max_tokens=8, ignore_eos=True, custom_logit_processor=Fails)
    with pytest.raises(ProcessorFault, match="no such luck") as caught:
        quiet(llm, ["a", "b", "c"], [FOREVER, fails, FOREVER])
    fault = caught.value
    assert (fault.name, fault.kind) == ("Fails", "exception")
    assert fault.digest.startswith("sha256:")
    assert "in __call__\nZeroDivisionError: no such luck" in fault.traceback
    assert fault.traceback in "".join(fault.__notes__)
    assert isinstance(fault, LogitshipError)
    steps = llm._engine.stats().steps
    assert steps < 100  # of the 500 that the others wanted
    assert_idle(llm)


def test_a_fault_of_another_kind(llm: LLM) -> None:
    def lose_a_token(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[1:]

    with pytest.raises(ProcessorFault) as caught:
        quiet(llm, "a", SamplingParams(logits_processors=[lose_a_token]))
    assert caught.value.kind == "bad_result"


def test_any_other_failure_is_a_generation_error_with_what_there_was(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("the test's")

    monkeypatch.setattr(llm._engine._engine._runner, "forward", broken)
    with pytest.raises(GenerationError) as caught:
        quiet(llm, "a", GREEDY)
    assert caught.value.type == "InternalServerError"
    assert isinstance(caught.value.partial, RequestOutput)
    assert "the test's" in caplog.text


# --- interruption and end ---


def test_ctrl_c_cancels_the_call_and_the_next_one_works(llm: LLM) -> None:
    """The signal arrives while the main thread waits for the engine."""
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


def test_what_the_progress_bar_raises_cancels_the_call(llm: LLM) -> None:
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


def test_shutdown_ends_what_another_thread_waits_for(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1, max_queued_requests=0)
    running = threading.Event()

    def tell(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        running.set()
        return logits

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logits_processors=[tell])
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


def own_threads(llm: LLM) -> list[threading.Thread]:
    return [llm._loop_thread._thread, llm._engine._thread._thread]


def test_the_context_manager_shuts_down(make_engine: Callable[..., AsyncEngine]) -> None:
    with LLM._from_engine(make_engine()) as llm:
        threads = own_threads(llm)
        assert [thread.is_alive() for thread in threads] == [True, True]
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_the_last_reference_ends_the_threads(make_engine: Callable[..., AsyncEngine]) -> None:
    llm = LLM._from_engine(make_engine())
    quiet(llm, ["a", "b"], GREEDY)
    threads, reference = own_threads(llm), weakref.ref(llm)
    del llm
    gc.collect()
    assert reference() is None
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_the_garbage_collector_may_end_it_on_any_thread(make_engine: Callable[..., AsyncEngine]) -> None:
    """Even on the engine's own, which cannot wait for its own end."""
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


# --- conversations ---

CONVERSATION = [{"role": "user", "content": "hi"}]


def chat(llm: LLM, messages: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    return llm.chat(messages, params, use_tqdm=False, **options)


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = chat(llm, CONVERSATION)
    assert output.prompt == "user: hi\nassistant: "
    assert tokens([output]) == tokens(quiet(llm, "user: hi\nassistant: ", GREEDY))


def test_chat_takes_many_conversations(llm: LLM) -> None:
    other: list[Mapping[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    outputs = chat(llm, [CONVERSATION, other], [GREEDY, GREEDY])
    assert [output.prompt for output in outputs] == ["user: hi\nassistant: ", "system: a\nb\nassistant: c\nassistant: "]


def test_chat_options(llm: LLM) -> None:
    assert chat(llm, CONVERSATION, add_generation_prompt=False)[0].prompt == "user: hi\n"
    template = "{{ greeting }} {{ messages[0]['content'] }}"
    (output,) = chat(llm, CONVERSATION, chat_template=template, chat_template_kwargs={"greeting": "oh"})
    assert output.prompt == "oh hi"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: is an empty list"),
        ([CONVERSATION, []], r"messages\[1\]: is an empty list"),
        ([CONVERSATION, [{"role": "user"}]], r"messages\[1\]\[0\].content: is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: part 0 .* not a text part"),
        ([{"role": "user", "content": "x" * 600}], "messages: has 6.. tokens"),
    ],
)
def test_chat_refuses(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat(llm, messages)
