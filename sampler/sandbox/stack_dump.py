"""From faulthandler's dump of the stack of a process that gave no answer to a traceback for the author.

The dump comes from the sandbox: it may be anything. A line of it that has not the form of a frame is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from logitship.client.author_errors import MAX_TEXT_LENGTH, is_machinery
from logitship.client.scrub import scrub

_MAX_DUMP = 1 << 14
_MAX_FRAMES = 20
_MAX_LINE_LENGTH = 200
_FRAME = re.compile(r'  File "([^"\n]{1,500})", line (\d{1,7}) in ([^\n]{1,200})')
_ADVICE = (
    "TimeoutError: it was here when its time was over. Is there a loop that does not end, or work for each token of "
    "the vocabulary that belongs into prepare(self, tokenizer, vocab_size)? The server's limits are "
    "sandbox_step_timeout, sandbox_first_step_timeout and sandbox_load_timeout."
)


def traceback_of(dump: bytes, line_of: Callable[[str, int], str]) -> str:
    """Return where the author's code was, in the form of a traceback.

    Args:
        dump: what `faulthandler` wrote, the innermost frame first.
        line_of: returns a line of the processor's source by its file and number; "" if it is not known.

    Returns:
        At most `MAX_TEXT_LENGTH` characters; "" if the dump has no frame of the author's code.
    """
    text = dump[:_MAX_DUMP].decode("ascii", errors="replace")
    frames = [match.groups() for match in map(_FRAME.fullmatch, text.splitlines()) if match is not None]
    frames.reverse()
    of_start = next((index for index, (filename, _, _) in enumerate(frames) if is_machinery(filename)), 0)
    shown = [frame for frame in frames[of_start:] if not is_machinery(frame[0])][-_MAX_FRAMES:]
    if not shown:
        return ""
    lines = ["Traceback (most recent call last):"]
    for filename, number, function in shown:
        lines.append(f'  File "{scrub(filename)}", line {number}, in {scrub(function)}')
        if int(number) and (source := line_of(filename, int(number)).strip()):
            lines.append(f"    {scrub(source)[:_MAX_LINE_LENGTH]}")
    return "\n".join([*lines, _ADVICE, ""])[-MAX_TEXT_LENGTH:]
