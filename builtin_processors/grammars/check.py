"""Compiles a grammar before the server does, in a process that can be ended.

A schema of fifty characters can take hours to compile, and a chain of rules can overflow the stack, which ends a
process. llguidance bounds most of what it does, but not all. So what comes with a request is compiled here first. The
server compiles what took little time, memory and stack, and nothing else.

Run as a script by `GrammarChecker`: each line of stdin and stdout is a JSON value. First come the seconds that a
grammar may take and the arguments of `make_tokenizer`, answered by null; then grammars, each answered by an error
message or null. The process is ended by SIGPROF when a grammar takes longer.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable
from queue import SimpleQueue

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_DATA = 1 << 30
"""Bytes of memory for a check: the tokenizer takes some 100 MiB of it, most schemas less than one."""
_NO_TEXT = ("NoExtension", "NoExtensionBias")
"""llguidance's words for a text that cannot go on."""
_STACK = 1 << 20
"""Bytes of stack for a check. Less than any thread of the server has, so that what fits here fits there."""


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The tokens as llguidance needs them. Takes a few tenths of a second.

    Args:
        tokenizer_json: a `tokenizers.Tokenizer`, as its `to_str` writes it.
        vocab_size: number of columns of the masks.
        eos_token_ids: what may follow a complete text. Not empty.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_ids)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of the text, its first mask computed: copies of it need not do that again.

    Args:
        grammar: in llguidance's words, see `source`.

    Raises:
        ValueError: the grammar is wrong, or too complex; says why.
    """
    limits = LLParserLimits(
        max_lexer_states=30_000,  # some 2 kB each, of each sequence
        step_max_items=200_000,  # some 10 ms a step; rules of single characters need more than the default
        verbose_errors=False,  # verbose ones hold the parser's state
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        # It ends with an excerpt of the grammar.
        reason = re.split(r"\n *\d+ \| |<non-verbose/>", matcher.get_error())[0]
        raise ValueError("no text fits it" if reason in _NO_TEXT else " ".join(reason.split())[:400])
    return matcher


def check(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """The reason why a grammar cannot be used, or None. Computed on a small stack."""
    answers: SimpleQueue[str | None] = SimpleQueue()

    def run() -> None:
        try:
            make_matcher(tokenizer, grammar)
        except ValueError as error:
            answers.put(str(error))
        else:
            answers.put(None)

    thread = threading.Thread(target=run)
    thread.start()
    return answers.get()


def main(lines: Iterable[str]) -> None:
    """See the module's text."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA, _MAX_DATA))
    threading.stack_size(_STACK)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests = map(json.loads, lines)
    seconds, arguments = next(requests)
    tokenizer = make_tokenizer(**arguments)
    print(json.dumps(None), flush=True)
    for grammar in requests:
        # Seconds of the CPU: a busy machine refuses no grammar. The kernel counts, as native code lets nobody else.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reason = check(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main(sys.stdin)
