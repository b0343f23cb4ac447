"""A check from beginning to end."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import torch

from logitship.client.check_report import BatchTiming, CheckReport, CheckResult, SlowLine, Verdict
from logitship.client.errors import ProcessorFault
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor
from logitship.server.check.checks.argmax import check_argmax
from logitship.server.check.checks.contract import check_contract, check_finite
from logitship.server.check.checks.determinism import check_determinism
from logitship.server.check.checks.params_check import Params, given_params, with_a_variant
from logitship.server.check.checks.rows_check import check_rows
from logitship.server.check.checks.serializability import NotSerializable, check_serializability, shipped, try_to_load
from logitship.server.check.checks.speed import check_speed
from logitship.server.check.checks.state import check_state
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel, load_model

from .bench import Bench
from .check_options import CHECKS, CheckOptions
from .dry_run import DryRun, Facts
from .recording import Recording, record
from .replay import replay, together
from .result import not_checked, result
from .test_cases import NUM_TRIALS, Trial, make_trials

_FEWEST_RECORDINGS = 2
"""Below that, there is nothing to compare."""
_KILLED = frozenset({"deadline", "crash", "cpu_time", "protocol", "load"})
"""Faults that end a sandbox."""


def run_check(
    cls: type[CustomLogitProcessor],
    options: CheckOptions,
    config: ServerConfig,
    *,
    target: str = "",
    loaded: LoadedModel | None = None,
) -> CheckReport:
    """Check a class.

    Args:
        config: which model; and where processors run, within which limits.
        target: how the class was named.
        loaded: a model that is loaded already, instead of the one that `config` names.

    Raises:
        UsageError: the class needs parameters, and none are known.
        StartError: the model cannot be loaded, or no sandbox can be made.
    """
    check = _Check(cls, options, config, target)
    try:
        shipment = shipped(cls)  # before the model is loaded, which takes longer
    except NotSerializable as error:
        return check.ended(error)
    bench = Bench(config, loaded or load_model(config), max_rows_of(options))
    try:
        return check.on(bench, *shipment)
    finally:
        bench.close()


def check_on(bench: Bench, cls: type[CustomLogitProcessor], options: CheckOptions) -> CheckReport:
    """The same on a bench that is there already, for calls of up to `max_rows_of(options)` rows."""
    check = _Check(cls, options, bench.config, "")
    try:
        return check.on(bench, *shipped(cls))
    except NotSerializable as error:
        return check.ended(error)


def max_rows_of(options: CheckOptions) -> int:
    """Most rows of a call that a check makes."""
    return max(*options.batch_sizes, NUM_TRIALS)


class _Check:
    """A check that is under way, and what is known so far."""

    def __init__(
        self, cls: type[CustomLogitProcessor], options: CheckOptions, config: ServerConfig, target: str
    ) -> None:
        self._cls = cls
        self._options = options
        self._config = config
        self._target = target
        self._params = given_params(cls.params_schema, options.params)
        self._num_given = len(self._params)
        self._digest = ""
        self._vocab_size = 0
        self._checks: dict[str, CheckResult] = {}
        self._timings: list[BatchTiming] = []
        self._slow_lines: list[SlowLine] = []

    def on(self, bench: Bench, string: PickledProcessor, size: int) -> CheckReport:
        """Make all checks.

        Args:
            string: the class off the wire.
            size: bytes of its string.
        """
        self._digest, self._vocab_size = string.digest, bench.model.vocab_size
        try:
            try_to_load(bench, string)
            self._run(bench, string, size)
        except NotSerializable as error:
            return self.ended(error)
        return self._report()

    def ended(self, error: NotSerializable) -> CheckReport:
        """There is nothing that could run."""
        self._add(result("travels", "it does not reach a server", [error.finding]))
        return self._report()

    def _run(self, bench: Bench, string: PickledProcessor, size: int) -> None:
        self._params = with_a_variant(self._params, lambda params: self._takes(bench, string, params))
        trials = make_trials(bench.loaded, self._options.prompts, self._params)
        everything = self._recordings(bench, string, trials)
        recordings = [recording for recording in everything if recording.steps]
        rehearsal, facts = _rehearsed(bench, string, everything)
        self._add(check_contract(everything, facts, params_given=any(self._params)))
        self._add(check_finite(everything))
        if self._failed("contract") or len(recordings) < _FEWEST_RECORDINGS:
            for name in CHECKS[CHECKS.index("finite") + 1 :]:
                self._add(not_checked(name, "it fails before that could be seen"))
            self._add(check_serializability(bench, string, size, []))
            return
        self._compare(bench, string, recordings, facts)
        self._add(check_serializability(bench, string, size, [] if self._failed("deterministic") else recordings))
        self._add(check_argmax(rehearsal, recordings))
        if self._failed("rows"):  # rows that want the same may do
            recordings = [each for each in recordings if each.trial.params == recordings[0].trial.params]
        measured = check_speed(bench, string, self._cls, recordings, rehearsal, self._options.batch_sizes)
        self._add(measured.result)
        self._timings, self._slow_lines = measured.timings, measured.slow_lines

    def _compare(
        self, bench: Bench, string: PickledProcessor, recordings: list[Recording], facts: Facts | None
    ) -> None:
        """The checks that play sequences again. Each takes for granted what the one before found out."""
        self._add(check_determinism(bench, string, recordings))
        if self._failed("deterministic"):
            for name in ("state", "rows"):
                self._add(not_checked(name, "cannot be told while the same history gives other logits"))
            return
        self._add(check_state(bench, string, recordings, facts))
        if self._failed("state"):
            self._add(not_checked("rows", "cannot be told while a sequence depends on what others did: see state"))
            return
        self._add(check_rows(bench, string, recordings, facts))

    def _takes(self, bench: Bench, string: PickledProcessor, params: Params) -> bool:
        """True if a short sequence with these parameters does not fail."""
        trial = make_trials(bench.loaded, self._options.prompts, [params])[0]
        return self._recorded(bench, string, trial).fault is None

    def _recordings(self, bench: Bench, string: PickledProcessor, trials: Sequence[Trial]) -> list[Recording]:
        """Of all trials; up to the first that was killed, because the others would only take as long."""
        recordings: list[Recording] = []
        for trial in trials:
            recordings.append(self._recorded(bench, string, trial))
            if _is_killed(recordings[-1].fault):
                break
        return recordings

    def _recorded(self, bench: Bench, string: PickledProcessor, trial: Trial) -> Recording:
        with bench.stage(string) as stage:
            return record(stage, trial, self._options.max_tokens, bench.model.eos_token_ids)

    def _add(self, check: CheckResult) -> None:
        self._checks[check.name] = check

    def _failed(self, name: str) -> bool:
        return name in self._checks and self._checks[name].verdict is Verdict.FAILED

    def _report(self) -> CheckReport:
        return CheckReport(
            target=self._target or f"{self._cls.__module__}:{self._cls.__qualname__}",
            name=self._cls.__name__,
            digest=self._digest,
            model=self._config.model_name,
            vocab_size=self._vocab_size,
            isolation=self._config.processor_isolation,
            versions={"logitship": version("logitship"), "python": PYTHON, "torch": torch.__version__},
            params=[dict(each) for each in self._params],
            num_given_params=self._num_given,
            checks=[self._checks.get(name) or not_checked(name, "there is nothing to run") for name in CHECKS],
            timings=self._timings,
            slow_lines=self._slow_lines,
            ignored=self._options.ignore,
        )


def _is_killed(fault: ProcessorFault | None) -> bool:
    return fault is not None and fault.kind in _KILLED


def _rehearsed(
    bench: Bench, string: PickledProcessor, recordings: list[Recording]
) -> tuple[DryRun | None, Facts | None]:
    """What can be seen in this process, unless it would hang here, or end it: alone, or all rows together."""
    playable = [recording for recording in recordings if recording.steps]
    if any(_is_killed(recording.fault) for recording in recordings):
        return None, None
    with bench.stage(string) as stage:
        found = replay(stage, playable, together(playable, range(len(playable))))
    if found is not None and _is_killed(found.fault):
        return None, None
    try:
        rehearsal = DryRun(string, bench.model)
    except Exception:  # noqa: BLE001  # it loads in the sandbox: only what this process could add is missing
        return None, None
    return rehearsal, rehearsal.facts(playable)
