"""Runs of the author's class, one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from logitship.client.errors import LogitshipError, ProcessorFault
from logitship.client.processor import CustomLogitProcessor
from logitship.server.check.check_options import UsageError, read_params
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from logitship.server.offline.sampling_params import SamplingParams

from .author_file import AuthorFile
from .debugger import LEFT
from .run_report import WIDTH, TraceStyle, answer_text, import_traceback, shown_path, with_source_lines

_CANDIDATES = 5

Wait = Callable[[Iterable[Path], Callable[[], bool]], None]
"""Waits for a change of files: see `wait_for_change`."""


@dataclass(frozen=True, kw_only=True)
class DevOptions:
    """Options of the runs.

    Attributes:
        prompts: run together, as rows of one batch.
        params: JSON text of `custom_params`, or `@` and a file name.
        max_tokens: most tokens of an answer.
        temperature: 0: the most likely token.
        seed: of random sampling, so that two runs differ only by the code.
        is_chat: send each prompt as a user's message, in the model's chat template.
        trace: how to show traces.
    """

    prompts: Sequence[str]
    params: str = "{}"
    max_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    is_chat: bool = True
    trace: TraceStyle = "lines"

    @property
    def data_files(self) -> tuple[Path, ...]:
        """Files that the options name."""
        return (Path(self.params[1:]).resolve(),) if self.params.startswith("@") else ()


class DevSession:
    """Runs the class of a file on prompts.

    Args:
        llm: runs processors in this process.
        file: the author's file.
        options: of the runs.
        write: writes lines to the terminal.
    """

    def __init__(self, llm: LLM, file: AuthorFile, options: DevOptions, write: Callable[[str], None]) -> None:
        self._llm = llm
        self._file = file
        self._options = options
        self._write = write

    def run_on_every_save(self, wait: Wait) -> None:
        """Run the class, and again whenever one of its files is saved, until `wait` raises."""
        while True:
            self.run()
            self._write(f"\nwaiting for a change of {shown_path(self._file.path)} (Ctrl-C ends)")
            if not self._file.has_changed:
                wait(self._file.paths, lambda: self._file.has_changed)

    def run(self) -> bool:
        """Load the class and run it once. Return whether there was an answer to each prompt."""
        title = f"── {self._file.target}  {datetime.now():%H:%M:%S} "
        self._write(f"\n{title:─<{WIDTH}}")
        try:
            cls = self._file.load()
            params = read_params(self._options.params)
            try:
                outputs = self._generate(cls, params)
            except ProcessorFault as fault:
                self._write(self._fault_text(fault, params))
                return False
        except UsageError as error:
            cause = error.__cause__
            self._write(str(error) if cause is None else import_traceback(cause, self._file.paths))
            return False
        except (LogitshipError, ValueError, TypeError) as error:
            self._write(with_source_lines(str(error), self._file.paths))
            return False
        for prompt, output in zip(self._options.prompts, outputs, strict=True):
            if len(outputs) > 1:
                self._write(f"\nprompt: {prompt}")
            self._write(answer_text(output, self._options.trace))
        return True

    def _generate(self, cls: type[CustomLogitProcessor], params: Mapping[str, Any]) -> list[RequestOutput]:
        sampling_params = SamplingParams(
            custom_logit_processor=cls,
            custom_params=dict(params),
            max_tokens=self._options.max_tokens,
            temperature=self._options.temperature,
            seed=self._options.seed,
            trace=None if self._options.trace == "off" else _CANDIDATES,
        )
        prompts = list(self._options.prompts)
        if not self._options.is_chat:
            return self._llm.generate(prompts, sampling_params, use_tqdm=False)
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return self._llm.chat(conversations, sampling_params, use_tqdm=False)

    def _fault_text(self, fault: ProcessorFault, params: Mapping[str, Any]) -> str:
        if LEFT in fault.message:
            return "left in the debugger"
        text = with_source_lines(fault.traceback, self._file.paths)
        # The last line of the traceback is the exception. Other faults, such as an invalid result, have no traceback.
        lines = [text, ""] if text else []
        return "\n".join([*lines, fault.message, f"params: {json.dumps(params)}"])
