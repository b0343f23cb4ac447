from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitship.builtin_processors.grammars import check
from logitship.builtin_processors.grammars.checker import GrammarChecker
from logitship.builtin_processors.grammars.compiler import GrammarCompiler
from logitship.builtin_processors.grammars.grammar_source import from_ebnf, from_json_schema, from_regex
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.sampler.client_context import on_behalf_of
from logitship.sampler.processors.request_view import ModelView
from logitship.server.tokenizer import Tokenizer

TIME = "takes too much time"
DEADLINE = 1.0


def _nested(before: str, after: str, depth: int) -> str:
    return before * depth + '{"type": "string"}' + after * depth


def _chain(length: int) -> str:
    rules = [f"r{i} ::= r{i + 1}" for i in range(length)]
    return "\n".join(["root ::= r0", *rules, f'r{length} ::= "a"'])


HOSTILE: dict[str, tuple[Callable[[], str], str | None]] = {
    "nested repetition": (lambda: from_regex("((((a{1,99}){1,99}){1,99}){1,99})"), None),
    "a huge repetition": (lambda: from_regex("a{1000000000}"), None),
    "an exponential automaton": (lambda: from_regex("(a|b)*a(a|b){40}"), None),
    "deep brackets": (lambda: from_regex("(" * 50_000 + "a" + ")" * 50_000), "invalid regex"),
    "deep objects": (lambda: from_json_schema(_nested('{"properties": {"a": ', "}}", 300)), "nests too deeply"),
    "deep arrays": (lambda: from_json_schema(_nested('{"items": ', "}", 300)), "recursion limit"),
    "a product of schemas": (
        lambda: from_json_schema(
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(6)]} for i in range(12)]}
        ),
        "too large",
    ),
    "intersected automata": (
        lambda: from_json_schema(
            {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 25)]}
        ),
        TIME,
    ),
    "a huge divisor": (lambda: from_json_schema({"type": "integer", "multipleOf": 99999989}), TIME),
    "a schema that is itself": (lambda: from_json_schema({"$ref": "#"}), "."),
    "a chain of rules": (lambda: from_ebnf(_chain(20_000)), "nests too deeply"),
    "a doubling chain": (
        lambda: from_ebnf(
            "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"'
        ),
        None,
    ),
    "deep groups": (lambda: from_ebnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "too deeply"),
    "a rule that is itself": (lambda: from_ebnf("root ::= root"), "."),
    "an enormous enum": (lambda: from_json_schema({"enum": [f"value {i * 7919}" for i in range(9_000)]}), None),
}
"""Grammars that might block a server, with the error message; None if the grammar is accepted."""


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> ModelView:
    return ModelView(260, frozenset({1}), tokenizer.hf_tokenizer)


@pytest.fixture(scope="module")
def compiler(model: ModelView) -> GrammarCompiler:
    return GrammarCompiler(model, cpu_limit=DEADLINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_expensive_grammars_are_refused_in_time(compiler: GrammarCompiler, name: str) -> None:
    make, says = HOSTILE[name]
    began = time.monotonic()
    if says is None:
        matcher = compiler.compile(make()).deep_copy()
        for _ in range(50):
            step = time.thread_time()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            assert time.thread_time() - step < 1
            if matcher.is_error():  # the grammar became too complex
                break
            matcher.consume_token(int(bits.nonzero()[0][-1]))
    else:
        with pytest.raises(ValueError, match=says):
            compiler.compile(make())
    assert time.monotonic() - began < DEADLINE + 60  # without a limit, they would take far longer
    assert compiler.compile(from_regex("ab")).compute_bitmask()  # the next grammar is compiled


def test_refusal_is_cached(model: ModelView) -> None:
    compiler = GrammarCompiler(model, cpu_limit=0.5)
    grammar = from_json_schema({"type": "integer", "multipleOf": 99999989})
    for _ in range(2):
        with pytest.raises(ValueError, match=TIME):
            compiler.compile(grammar)
        assert compiler._checkers[0]._process is None  # ended by the first attempt, and not restarted for the second


def test_least_recently_used_grammar_is_evicted(model: ModelView) -> None:
    compiler = GrammarCompiler(model, max_grammars=2)
    one, two = (compiler.compile(from_regex(text)) for text in ("one", "two"))
    assert compiler.compile(from_regex("one")) is one
    compiler.compile(from_regex("three"))
    assert compiler.compile(from_regex("one")) is one
    assert compiler.compile(from_regex("two")) is not two


def test_threads_share_the_grammar(compiler: GrammarCompiler) -> None:
    made = []
    threads = [
        threading.Thread(
            target=lambda i=i: made.append(compiler.compile(from_regex(f"x{i % 3}")).deep_copy().compute_bitmask())
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 12
    assert len(set(made)) == 1


def test_mask_has_a_bit_per_column(model: ModelView, tokenizer: Tokenizer) -> None:
    assert GrammarCompiler(model).mask_words == 9
    assert GrammarCompiler(ModelView(300, frozenset({1}), tokenizer.hf_tokenizer)).mask_words == 10
    # Fewer columns than tokens: those that the model does not have are there, too.
    assert GrammarCompiler(ModelView(200, frozenset({1}), tokenizer.hf_tokenizer)).mask_words == 9


def test_unsupported_models(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="EOS token"):
        GrammarCompiler(ModelView(260, frozenset(), tokenizer.hf_tokenizer))
    with pytest.raises(ValueError, match="fast one"):
        GrammarCompiler(ModelView(260, frozenset({1}), object()))


def test_dead_checker_process_is_replaced(model: ModelView) -> None:
    compiler = GrammarCompiler(model)
    compiler.compile(from_regex("a"))
    process = compiler._checkers[0]._process
    assert process is not None
    process.kill()
    process.wait()
    compiler.compile(from_regex("b"))
    assert compiler._checkers[0]._process is not process


def test_checker_process_ends_with_its_owner(model: ModelView) -> None:
    compiler = GrammarCompiler(model)
    compiler.compile(from_regex("a"))
    process = compiler._checkers[0]._process
    assert process is not None
    del compiler
    assert process.poll() is not None


def process_and_timer(checker: GrammarChecker) -> tuple[subprocess.Popen[str], threading.Timer]:
    assert checker._process is not None
    assert checker._timer is not None
    return checker._process, checker._timer


def test_checker_process_ends_when_it_is_idle(model: ModelView) -> None:
    checker = GrammarChecker(tokenizer_arguments(model), idle_timeout=0.05)
    checker.check(from_regex("a"))
    process, timer = process_and_timer(checker)
    timer.join()
    assert process.poll() == -signal.SIGKILL
    assert checker._process is None
    checker.check(from_regex("b"))
    assert checker._process is not process
    checker.close()


def test_checker_process_in_use_is_not_idle(model: ModelView) -> None:
    """The timer starts anew with each grammar. One whose thread is late does nothing."""
    checker = GrammarChecker(tokenizer_arguments(model), idle_timeout=60.0)
    checker.check(from_regex("a"))
    process, timer = process_and_timer(checker)
    late = threading.Thread(target=checker.kill_idle)
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        checked = threads.submit(checker.check, from_regex("b"))
        timer.join()  # which the check stops
        assert checker._timer is None
        late.start()
        process.send_signal(signal.SIGCONT)
        checked.result()
    late.join()
    assert checker._process is process
    assert checker._timer is not timer
    checker.close()


def test_no_thread_waits_for_a_checker_that_is_gone(model: ModelView) -> None:
    checker = GrammarChecker(tokenizer_arguments(model), idle_timeout=600.0)
    checker.check(from_regex("a"))
    _, timer = process_and_timer(checker)
    del checker
    timer.join(timeout=60)
    assert not timer.is_alive()


def tokenizer_arguments(model: ModelView) -> dict[str, Any]:
    return {"tokenizer_json": model.tokenizer.backend_tokenizer.to_str(), "vocab_size": 260, "eos_token_ids": [1]}


def test_busy_machine_refuses_no_grammar(model: ModelView) -> None:
    """Only CPU time counts: the process is stopped for longer than a grammar may take."""
    checker = GrammarChecker(tokenizer_arguments(model), cpu_limit=1.0)
    checker.check(from_regex("a"))
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        checked = threads.submit(checker.check, from_regex("b"))
        with pytest.raises(TimeoutError):
            checked.result(timeout=1.5)
        process.send_signal(signal.SIGCONT)
        checked.result()
    assert checker._process is process
    checker.close()


def test_unchecked_grammar_is_not_cached(model: ModelView) -> None:
    compiler = GrammarCompiler(model)
    compiler.compile(from_regex("a"))
    process = compiler._checkers[0]._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    compiler._checkers[0]._timeout = 0.01
    with pytest.raises(PreparationUnavailable, match="try again later"):
        compiler.compile(from_regex("b"))
    assert process.poll() == -signal.SIGKILL
    compiler._checkers[0]._timeout = 60.0
    compiler.compile(from_regex("b"))


def test_wait_for_other_checks_times_out(model: ModelView) -> None:
    compiler = GrammarCompiler(model, timeout=0.01, num_checkers=1)
    with compiler._slots.use("a", 0), pytest.raises(PreparationUnavailable, match="other grammars: try again later"):
        compiler.compile(from_regex("a"))
    assert compiler._checkers[0]._process is None


def test_grammars_of_one_tenant_do_not_delay_another(model: ModelView) -> None:
    """The checker of tenant a is stopped; its other grammars wait, and b's is compiled."""
    compiler = GrammarCompiler(model, num_checkers=2)

    def compile_for(tenant: str, text: str) -> None:
        with on_behalf_of(tenant):
            compiler.compile(from_regex(text))

    compile_for("a", "first")
    process = compiler._checkers[0]._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(20) as threads:
        theirs = [threads.submit(compile_for, "a", f"a{i}") for i in range(14)]
        threads.submit(compile_for, "b", "b").result(timeout=60)
        assert not any(each.done() for each in theirs)
        while compiler.num_waiting < 13:
            time.sleep(0.01)
        assert compiler.num_checks == 1
        process.send_signal(signal.SIGCONT)
        for each in theirs:
            each.result(timeout=60)
    assert compiler._checkers[0]._process is process


def test_equal_grammars_are_checked_once(model: ModelView, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    original = GrammarChecker.check

    def counted(self: GrammarChecker, grammar: str, **options: bool) -> None:
        checked.append(grammar)
        original(self, grammar, **options)

    monkeypatch.setattr(GrammarChecker, "check", counted)
    compiler = GrammarCompiler(model, num_checkers=1)
    with ThreadPoolExecutor(8) as threads:
        with compiler._slots.use("other", 0):
            made = [threads.submit(compiler.compile, from_regex("a")) for _ in range(8)]
        assert len({id(each.result(timeout=60)) for each in made}) == 1
    assert len(checked) == 1


def test_refusals_do_not_evict_grammars(model: ModelView) -> None:
    compiler = GrammarCompiler(model, max_grammars=1)
    matcher = compiler.compile(from_regex("a"))
    for text in ("(", "(("):
        with pytest.raises(ValueError, match="unclosed group"):
            compiler.compile(from_regex(text))
    assert compiler.compile(from_regex("a")) is matcher


@pytest.mark.slow
def test_long_check_continues_at_low_priority(model: ModelView) -> None:
    checker = GrammarChecker(tokenizer_arguments(model), cpu_limit=2.0)
    checker.check(from_regex("a"))
    process = checker._process
    assert process is not None

    def nices() -> set[int]:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/stat")
        return {int(task.read_text().rpartition(")")[2].split()[16]) for task in tasks}

    normal = os.getpriority(os.PRIO_PROCESS, 0)
    assert nices() == {normal}
    with ThreadPoolExecutor() as threads:
        checked = threads.submit(checker.check, from_json_schema({"type": "integer", "multipleOf": 99999989}))
        while nices() != {normal, check._LOW_PRIORITY}:
            assert not checked.done()
            time.sleep(0.01)
        with pytest.raises(ValueError, match=TIME):
            checked.result()
    assert checker.took_long


def test_tenant_with_a_long_grammar_continues_at_low_priority(
    model: ModelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen of them would slow the engine down for a second. After a short one, the next begins as usual."""
    begun = []
    original = GrammarChecker.check

    def recorded(self: GrammarChecker, grammar: str, *, at_low_priority: bool = False) -> None:
        begun.append(at_low_priority)
        original(self, grammar, at_low_priority=at_low_priority)

    monkeypatch.setattr(GrammarChecker, "check", recorded)
    compiler = GrammarCompiler(model, cpu_limit=0.3, num_checkers=1)
    with pytest.raises(ValueError, match=TIME):
        compiler.compile(from_json_schema({"type": "integer", "multipleOf": 99999989}))
    with on_behalf_of("another"):
        compiler.compile(from_regex("z"))
    for text in "abc":
        compiler.compile(from_regex(text))
    with pytest.raises(ValueError, match="unclosed group"):
        compiler.compile(from_regex("(a"))
    assert begun == [False, False, True, False, False, False]


def test_checker_process_that_does_not_start(model: ModelView, caplog: pytest.LogCaptureFixture) -> None:
    checker = GrammarChecker(tokenizer_arguments(model) | {"tokenizer_json": "{"})
    with pytest.raises(PreparationUnavailable):
        checker.check(from_regex("a"))
    assert "ended before it was ready" in caplog.text
    assert checker._process is None


def test_checker_reports_the_reason(model: ModelView) -> None:
    checker = GrammarChecker(tokenizer_arguments(model))
    checker.check(from_regex("a"))
    with pytest.raises(ValueError, match="unclosed group"):
        checker.check(from_regex("(a"))
    checker.check(json.dumps({"grammars": [{"json_schema": {}}]}))
    checker.close()


# --- failures of the machine, and tenants ---


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_failure_that_may_be_the_machines_is_not_remembered(
    number: signal.Signals, model: ModelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills a process when memory is short, and llguidance aborts it where no memory is given to it."""
    compiler = GrammarCompiler(model)
    compiler.compile(from_regex("a"))
    process = compiler._checkers[0]._process
    assert process is not None
    answer = GrammarChecker._answer

    def ended(self: GrammarChecker, of: subprocess.Popen[str]) -> str:
        if of is process:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        return answer(self, of)

    monkeypatch.setattr(GrammarChecker, "_answer", ended)
    process.send_signal(signal.SIGSTOP)  # so that it does not answer before
    is_abort = number == signal.SIGABRT
    with pytest.raises(
        ValueError if is_abort else PreparationUnavailable, match="too much memory" if is_abort else "try again later"
    ):
        compiler.compile(from_regex("b"))
    assert compiler.compile(from_regex("b")).compute_bitmask()


def test_memory_limit_is_not_remembered(model: ModelView) -> None:
    """The limit is reached earlier by a process that other grammars have filled."""
    compiler = GrammarCompiler(model)
    compiler.compile(from_regex("a"))
    process = compiler._checkers[0]._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    used = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (used + (1 << 20),) * 2)
    large = from_json_schema({"enum": [f"value {i * 7919}" for i in range(9_000)]})
    with pytest.raises(ValueError, match="it takes too much memory: make it simpler"):
        compiler.compile(large)
    assert compiler.compile(large).compute_bitmask()


def test_checker_process_dies_before_the_server_when_memory_is_short(model: ModelView) -> None:
    checker = GrammarChecker(tokenizer_arguments(model))
    checker.check(from_regex("a"))
    assert checker._process is not None
    assert Path(f"/proc/{checker._process.pid}/oom_score_adj").read_text() == "1000\n"
    checker.close()


@pytest.mark.parametrize("name", ["make_matcher", "Thread"])
def test_checker_process_that_fails_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not leave the server without an answer: no memory, or no thread, is left for it."""

    def fails(*_: object, **__: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(check if name == "make_matcher" else threading, name, fails)
    with pytest.raises(MemoryError):
        check.check(None, "", at_low_priority=False)  # type: ignore[arg-type]  # not used


def test_checker_without_a_thread_for_its_timer(model: ModelView, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar is checked all the same, and the process ends once a timer can be started again."""
    checker = GrammarChecker(tokenizer_arguments(model), idle_timeout=0.05)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        checker.check(from_regex("a"))
        with pytest.raises(ValueError, match="unclosed group"):
            checker.check(from_regex("(a"))
    assert checker._process is not None
    checker.check(from_regex("b"))
    _, timer = process_and_timer(checker)
    timer.join(60)
    assert checker._process is None


def test_tenants_share_no_grammar(model: ModelView, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that another one has sent takes as long as a new one, whether it was compiled or refused."""
    checked: list[str] = []
    original = GrammarChecker.check

    def counted(self: GrammarChecker, grammar: str, **options: bool) -> None:
        checked.append(grammar)
        original(self, grammar, **options)

    monkeypatch.setattr(GrammarChecker, "check", counted)
    compiler = GrammarCompiler(model)
    for tenant in "aabb":
        with on_behalf_of(tenant):
            compiler.compile(from_regex("secret"))
            with pytest.raises(ValueError, match="unclosed group"):
                compiler.compile(from_regex("(secret"))
    assert len(checked) == 4


def test_tenant_evicts_its_own_grammars_first(model: ModelView) -> None:
    compiler = GrammarCompiler(model, max_grammars=4)
    with on_behalf_of("quiet"):
        own = compiler.compile(from_regex("one"))
    with on_behalf_of("busy"):
        for number in range(12):
            compiler.compile(from_regex(f"x{number}"))
    with on_behalf_of("quiet"):
        assert compiler.compile(from_regex("one")) is own
