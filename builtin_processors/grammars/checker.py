"""The server's client of a checker process of grammars, see `check`."""

from __future__ import annotations

import json
from typing import Any

from logitship.builtin_processors.parts.checker_process import CheckerProcess

from . import check


class GrammarChecker(CheckerProcess):
    """Compiles grammars in a separate process, one after the other. Thread-safe.

    Args:
        tokenizer: the arguments of `check.make_tokenizer`.
        cpu_limit: maximum CPU seconds per grammar.
        timeout: maximum seconds to wait for the process to start, and for its answer.
        idle_timeout: seconds without a grammar after which the process is ended.

    Attributes:
        took_long: True if the last grammar took long, or ended the process.
    """

    def __init__(
        self,
        tokenizer: dict[str, Any],
        cpu_limit: float = 5.0,
        timeout: float = 60.0,
        idle_timeout: float = 30.0,
    ) -> None:
        super().__init__(check.__file__, tokenizer, "the grammar", cpu_limit, timeout, idle_timeout)
        self.took_long = False

    def check(self, grammar: str, *, at_low_priority: bool = False) -> None:
        """Check that a grammar can be compiled. Blocks.

        Args:
            grammar: the grammar.
            at_low_priority: start at a low priority, rather than drop to it after a while.

        Raises:
            ValueError: it cannot be compiled, or not within the limits of time, memory and stack; says why.
            TooMuchMemory: it cannot be compiled now, and may be on a machine with more memory.
            PreparationUnavailable: it could not be checked, because the process does not start or was killed, or the
                machine is too busy.
        """
        try:
            reason, self.took_long = self.ask(json.dumps((grammar, at_low_priority)))
        except BaseException:  # cleanup, then re-raised
            self.took_long = self.was_killed
            raise
        if reason is not None:
            raise ValueError(reason)
