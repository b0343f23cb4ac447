"""Run all checks of a processor class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from logitship.client.check_report import MAX_PRINTED, BatchTiming, CheckReport, CheckResult, SlowLine, Verdict
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor
from logitship.server.check.checks.contract import check_argmax, check_contract, check_finite
from logitship.server.check.checks.replays import check_determinism, check_rows, check_state
from logitship.server.check.checks.serializability import (
    NotSerializable,
    check_serializability,
    require_loadable,
    serialized,
)
from logitship.server.check.checks.speed import check_speed
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel, load_model

from .case_params import Params, add_variant, params_to_check
from .cases import NUM_CASES, CheckCase, make_cases
from .check_options import CHECKS, CheckOptions
from .check_progress import CheckProgress
from .class_import import require_processor_class
from .dry_run import DryRun, DryRunFacts
from .environment import CheckEnvironment
from .findings import is_killed, not_checked, result
from .replayed_calls import Recording, batched, record, replay

_MIN_RECORDINGS = 2
"""With fewer, there is nothing to compare."""


def run_check(
    cls: type[CustomLogitProcessor],
    options: CheckOptions,
    config: ServerConfig,
    *,
    target: str = "",
    loaded: LoadedModel | None = None,
) -> CheckReport:
    """Check a processor class.

    Args:
        cls: the class.
        options: parameters, prompts, and which checks to ignore.
        config: the model, the isolation of processors and their limits.
        target: the class as the user named it.
        loaded: a loaded model to use instead of the one that `config` names.

    Raises:
        UsageError: the class needs parameters, and none are known.
        StartError: the model cannot be loaded, or no sandbox can be started.
    """
    check = _Check(cls, options, config, target)
    try:
        string, size = serialized(cls)  # before the model is loaded, which takes longer
    except NotSerializable as error:
        return check.not_serializable(error)
    environment = CheckEnvironment(config, loaded or load_model(config), max_batch_size(options, check.num_params))
    try:
        return check.run(environment, string, size)
    finally:
        environment.close()


def check_class(
    cls: type[CustomLogitProcessor],
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    *,
    prompt: str | Sequence[str] | None,
    max_tokens: int,
    batch_sizes: Sequence[int],
    ignore: Sequence[str],
    settings: Mapping[str, Any],
) -> CheckReport:
    """Check a class. See `CustomLogitProcessor.check`.

    Raises:
        UsageError: an option is invalid, or the class cannot be checked.
        StartError: the model cannot be loaded, or no sandbox can be started.
        ValueError: a setting is out of range.
        TypeError: `settings` has a name that is not a setting of the server.
    """
    sets = [] if params is None else [params] if isinstance(params, Mapping) else list(params)
    prompts = CheckOptions().prompts if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt)
    options = CheckOptions(
        params=sets, prompts=prompts, max_tokens=max_tokens, batch_sizes=batch_sizes, ignore=frozenset(ignore)
    )
    return run_check(require_processor_class(cls, cls.__qualname__), options, ServerConfig(**settings))


def check_in_environment(
    environment: CheckEnvironment, cls: type[CustomLogitProcessor], options: CheckOptions
) -> CheckReport:
    """Check a class in an existing environment, which must take batches of `max_batch_size` rows."""
    check = _Check(cls, options, environment.config, "")
    try:
        return check.run(environment, *serialized(cls))
    except NotSerializable as error:
        return check.not_serializable(error)


def max_batch_size(options: CheckOptions, num_params: int = 1) -> int:
    """Return the number of rows of the largest call that a check with so many parameter sets makes."""
    return max(*options.batch_sizes, NUM_CASES, num_params)


class _Check:
    """A running check and its results so far.

    Attributes:
        num_params: parameter sets that are given, by the author or as examples.
    """

    def __init__(
        self, cls: type[CustomLogitProcessor], options: CheckOptions, config: ServerConfig, target: str
    ) -> None:
        self._cls = cls
        self._options = options
        self._config = config
        self._target = target
        self._params = params_to_check(cls.params_schema, options.params)
        self.num_params = len(self._params)
        self._digest = ""
        self._vocab_size = 0
        self._checks: dict[str, CheckResult] = {}
        self._progress = CheckProgress()
        self._timings: list[BatchTiming] = []
        self._slow_lines: list[SlowLine] = []
        self._printed = ""

    def run(self, environment: CheckEnvironment, string: PickledProcessor, size: int) -> CheckReport:
        """Run all checks.

        Args:
            environment: where processors run.
            string: the parsed processor string.
            size: bytes of the processor string.
        """
        environment.progress = self._progress = CheckProgress()
        self._digest, self._vocab_size = string.digest, environment.model.vocab_size
        self._progress.begin("serializable")
        try:
            require_loadable(environment, string)
            self._run_checks(environment, string, size)
        except NotSerializable as error:
            return self.not_serializable(error)
        finally:
            self._progress.end()
        return self._report()

    def not_serializable(self, error: NotSerializable) -> CheckReport:
        """Return the report of a class that a server cannot load."""
        self._add(result("serializable", "a server cannot load the class", [error.finding]))
        return self._report()

    def _run_checks(self, environment: CheckEnvironment, string: PickledProcessor, size: int) -> None:
        self._progress.begin("contract")
        self._params = add_variant(self._params, lambda params: self._accepts(environment, string, params))
        cases = make_cases(environment.loaded, self._options.prompts, self._params)
        all_recordings = self._record_cases(environment, string, cases)
        self._printed = next((recording.printed for recording in all_recordings if recording.printed), "")
        recordings = [recording for recording in all_recordings if recording.steps]
        dry_run, facts = _dry_run(environment, string, all_recordings)
        self._add(check_contract(all_recordings, facts, params_given=any(self._params)))
        self._add(check_finite(all_recordings))
        if self._failed("contract") or len(recordings) < _MIN_RECORDINGS:
            for name in CHECKS[CHECKS.index("finite") + 1 :]:
                self._add(not_checked(name, "the processor fails before this can be checked"))
            self._add(check_serializability(environment, string, size, []))
            return
        self._run_replays(environment, string, recordings, facts)
        self._progress.begin("serializable, from source")
        comparable = [] if self._failed("deterministic") else recordings
        self._add(check_serializability(environment, string, size, comparable))
        self._add(check_argmax(dry_run, recordings))
        if self._failed("rows"):  # rows with equal parameters may still work
            recordings = [each for each in recordings if each.case.params == recordings[0].case.params]
        self._progress.begin("speed")
        speed, self._timings, self._slow_lines = check_speed(
            environment, string, self._cls, recordings, dry_run, self._options.batch_sizes
        )
        self._add(speed)

    def _run_replays(
        self,
        environment: CheckEnvironment,
        string: PickledProcessor,
        recordings: list[Recording],
        facts: DryRunFacts | None,
    ) -> None:
        self._progress.begin("deterministic")
        self._add(check_determinism(environment, string, recordings))
        if self._failed("deterministic"):
            for name in ("state", "rows"):
                self._add(not_checked(name, "needs a deterministic processor: see deterministic"))
            return
        self._progress.begin("state")
        self._add(check_state(environment, string, recordings, facts))
        if self._failed("state"):
            self._add(not_checked("rows", "needs sequences that are independent of each other: see state"))
            return
        self._progress.begin("rows")
        self._add(check_rows(environment, string, recordings, facts))

    def _accepts(self, environment: CheckEnvironment, string: PickledProcessor, params: Params) -> bool:
        """Return whether a short sequence with these parameters runs without a fault."""
        case = make_cases(environment.loaded, self._options.prompts, [params])[0]
        return self._record_case(environment, string, case).fault is None

    def _record_cases(
        self, environment: CheckEnvironment, string: PickledProcessor, cases: Sequence[CheckCase]
    ) -> list[Recording]:
        """Record the cases, up to the first that is killed: the others would take as long to fail."""
        recordings: list[Recording] = []
        for case in cases:
            recordings.append(self._record_case(environment, string, case))
            if is_killed(recordings[-1].fault):
                break
        return recordings

    def _record_case(self, environment: CheckEnvironment, string: PickledProcessor, case: CheckCase) -> Recording:
        with environment.fresh_processor(string) as processor:
            return record(processor, case, self._options.max_tokens, environment.model.eos_token_ids)

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
            num_given_params=self.num_params,
            checks=[self._checks.get(name) or not_checked(name, "the processor does not run") for name in CHECKS],
            timings=self._timings,
            slow_lines=self._slow_lines,
            printed=self._printed[-MAX_PRINTED:],
            ignored=self._options.ignore,
        )


def _dry_run(
    environment: CheckEnvironment, string: PickledProcessor, recordings: list[Recording]
) -> tuple[DryRun | None, DryRunFacts | None]:
    """Run the processor in this process, unless a sandbox showed that it would hang or crash here.

    It may do so alone, or only with all rows in one batch.
    """
    started = [recording for recording in recordings if recording.steps]
    if any(is_killed(recording.fault) for recording in recordings):
        return None, None
    with environment.fresh_processor(string) as processor:
        mismatch = replay(processor, started, batched(started, range(len(started)), at_once=True))
    if mismatch is not None and is_killed(mismatch.fault):
        return None, None
    try:
        dry_run = DryRun(string, environment.model)
    except Exception:  # noqa: BLE001  # boundary: author code
        return None, None
    return dry_run, dry_run.facts(started)
