"""Is what it keeps kept where it survives, and where no other sequence finds it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.errors import ProcessorFault
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check.bench import Bench, Stage
from logitship.server.check.dry_run import Facts
from logitship.server.check.recording import Recording
from logitship.server.check.replay import Mismatch, alone, interleaved, play_call, replay
from logitship.server.check.result import result
from logitship.server.check.wording import describe, details

_ADVICE = (
    "What belongs to one sequence goes to custom_param_list[row]['__req__'].state, which is its own and is copied when "
    "it forks. `self` and the module are shared by all, and vanish with the sandbox: keep only tables there."
)


def check_state(
    bench: Bench, string: PickledProcessor, recordings: Sequence[Recording], facts: Facts | None
) -> CheckResult:
    """Compare sequences that were alone in their sandbox with the same ones after others, among others, and forked."""
    everyone = range(len(recordings))
    trials: tuple[tuple[str, Callable[[Stage], Mismatch | None]], ...] = (
        (
            "after other sequences in the same sandbox",
            lambda stage: replay(stage, recordings, alone(recordings, everyone)),
        ),
        (
            "in turns with other sequences, a call for each",
            lambda stage: replay(stage, recordings, interleaved(recordings, everyone)),
        ),
        ("forked, as for n > 1 and beam search", lambda stage: _forked(stage, recordings)),
    )
    for company, play in trials:
        with bench.stage(string) as stage:
            found = play(stage)
        if found is not None:
            seen = f"{company}: {describe(recordings, found)}{_changed(facts)}"
            traceback = found.fault.traceback if found.fault is not None else ""
            finding = Finding("state", Severity.ERROR, seen, _ADVICE, details(recordings, found), traceback)
            return result("state", "a sequence depends on what other sequences did", [finding])
    findings = [_unplain()] if facts is not None and facts.unplain else []
    return result("state", "the same after, among and forked from other sequences", findings)


def _changed(facts: Facts | None) -> str:
    if facts is None or not facts.changed:
        return ""
    return f". From call to call, this changes: {', '.join(facts.changed[:5])}"


def _unplain() -> Finding:
    return Finding(
        "state",
        Severity.NOTE,
        "__req__.state or the params hold something else than plain values, or over 4 KiB of them: if a call for "
        "several rows fails because of one, this sequence ends too, because its state cannot be restored",
    )


def _forked(stage: Stage, recordings: Sequence[Recording]) -> Mismatch | None:
    """Fork each sequence in its middle. Both play on as the one did that was recorded."""
    for number, recording in enumerate(recordings):
        trial, middle = recording.trial, recording.steps // 2
        player = stage.enter(trial.rid, trial.params, trial.prompt_token_ids)
        players = [player]
        for step in range(recording.steps):
            if step == middle and middle:
                try:
                    players.append(player.fork())
                except ProcessorFault as fault:
                    return Mismatch([(number, step)], 0, fault=fault)
            for each in players:
                found = play_call(stage, recordings, [(number, step)], [each])
                if found is not None:
                    return found
        for each in players:
            each.row.close()
    return None
