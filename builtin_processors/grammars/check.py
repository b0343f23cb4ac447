"""Compiles a grammar before the server does, in a process that can be killed.

A schema of fifty characters can take hours to compile, and a chain of rules can overflow the stack, which crashes the
process. llguidance limits most of its work, but not all. So a request's grammar is compiled here first. The server only
compiles grammars that took little time, memory and stack.

Run as a script by `GrammarChecker`: each line of stdin and stdout is a JSON value. The first line has the CPU seconds
per grammar and the arguments of `make_tokenizer`, and is answered by null. Each further line has a grammar, and whether
it is compiled at a low priority. It is answered by an error message or null, and whether it took long. SIGPROF kills
the process when a grammar takes longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_DATA = 1 << 30
"""Memory limit in bytes. The tokenizer takes some 100 MiB of it, most schemas less than 1 MiB."""
_LONG_CHECK = 0.1
"""Seconds from which on a check goes on at the low priority; until then it has the priority of the thread that started
the process. Nearly all grammars take less."""
_LOW_PRIORITY = 15
"""Nice value of the thread afterwards: beside a busy engine, 3% of a core. At 19 it would be 1.5%, and a grammar of a
second could not be checked within a minute."""
_NO_TEXT = ("NoExtension", "NoExtensionBias")
"""llguidance's stop reasons for a text that cannot be continued."""
_STACK = 1 << 20
"""Stack size in bytes. Less than that of the server's threads, so that what fits here fits there."""


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Create the tokenizer for llguidance. Takes a few tenths of a second.

    Args:
        tokenizer_json: a `tokenizers.Tokenizer`, serialized by `to_str`.
        vocab_size: number of columns of the masks.
        eos_token_ids: the tokens that may follow a complete text. Not empty.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_ids)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Create a matcher at the beginning of the text. Its first mask is computed, which copies then share.

    Args:
        tokenizer: result of `make_tokenizer`.
        grammar: a grammar in llguidance's syntax, see `grammar_source`.

    Raises:
        ValueError: the grammar is invalid or too complex; says why.
    """
    limits = LLParserLimits(
        max_lexer_states=30_000,  # some 2 kB each, per sequence
        step_max_items=200_000,  # some 10 ms per step; rules of single characters need more than the default
        verbose_errors=False,  # verbose errors contain the parser's state
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        # Cut off the excerpt of the grammar at its end, or the stack of llguidance.
        reason = re.split(r"\n *\d+ \| |<non-verbose/>|<backtrace>", matcher.get_error())[0].strip()
        if reason.startswith("panic:"):
            reason = f"llguidance failed, probably because it is too large: make it simpler ({reason})"
        raise ValueError("no text matches it" if reason in _NO_TEXT else " ".join(reason.split())[:400])
    return matcher


def check(tokenizer: LLTokenizer, grammar: str, at_low_priority: bool) -> tuple[str | None, bool]:
    """Compile a grammar on a small stack.

    A grammar that takes long continues at a low priority, so that it delays neither tokens nor other checks.

    Args:
        tokenizer: result of `make_tokenizer`.
        grammar: the grammar.
        at_low_priority: begin at the low priority.

    Returns:
        The reason why it cannot be used, or None; and whether it took long.
    """
    answer: Future[tuple[str | None, bool]] = Future()

    def run() -> None:
        if at_low_priority:
            _lower_priority(threading.get_native_id())
        reason = None
        try:
            make_matcher(tokenizer, grammar)
        except ValueError as error:
            reason = str(error)
        except BaseException as error:  # noqa: BLE001  # boundary: third-party code
            answer.set_exception(error)
            return
        answer.set_result((reason, time.thread_time() > _LONG_CHECK))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return answer.result(timeout=_LONG_CHECK)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            _lower_priority(thread.native_id or 0)
    return answer.result()


def _lower_priority(thread: int) -> None:
    lower = max(_LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0))  # the server's own may be lower still
    os.setpriority(os.PRIO_PROCESS, thread, lower)


def main(lines: Iterable[str]) -> None:
    """Run the checker; see the module's docstring."""
    with contextlib.suppress(OSError):  # the server must not be the one that is killed when memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA, _MAX_DATA))
    threading.stack_size(_STACK)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests = map(json.loads, lines)
    seconds, arguments = next(requests)
    tokenizer = make_tokenizer(**arguments)
    print(json.dumps(None), flush=True)
    for grammar, at_low_priority in requests:
        # CPU seconds, so that a busy machine refuses no grammar. A kernel timer, because native code does not yield.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = check(tokenizer, grammar, at_low_priority)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.stdin)
