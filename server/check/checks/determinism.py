"""Does the same history give the same logits?"""

from __future__ import annotations

from collections.abc import Sequence

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check.bench import Bench
from logitship.server.check.recording import Recording
from logitship.server.check.replay import alone, replay
from logitship.server.check.result import result
from logitship.server.check.wording import describe, details

_ADVICE = (
    "Random numbers, the clock, id() and hash() of text differ from process to process. Draw from a torch.Generator "
    "that you seed with the history, or with a seed in the params."
)


def check_determinism(bench: Bench, string: PickledProcessor, recordings: Sequence[Recording]) -> CheckResult:
    """Play each sequence once more, in a sandbox of its own."""
    for number in range(len(recordings)):
        with bench.stage(string) as stage:
            found = replay(stage, recordings, alone(recordings, [number]))
        if found is not None:
            seen = f"the same sequence, played twice in new sandboxes: {describe(recordings, found)}"
            finding = Finding("deterministic", Severity.ERROR, seen, _ADVICE, details(recordings, found))
            return result("deterministic", "the same history gives other logits", [finding])
    return result("deterministic", "the same history gives the same logits, in any sandbox")
