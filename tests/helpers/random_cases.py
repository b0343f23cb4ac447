"""Random examples, more or fewer of them by the profile of hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Test: TypeAlias = "Callable[..., None]"


def register_profiles() -> None:
    """Register the profiles of hypothesis: `fast` and `all` for the options of the same names, and `default`."""
    # How long an example takes depends on what else the machine does.
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # The same examples in each run.
    repeated = settings(common, derandomize=True, database=None)
    settings.register_profile("fast", repeated, max_examples=20)
    settings.register_profile("default", repeated, max_examples=50)
    settings.register_profile("all", common, max_examples=100, derandomize=False, print_blob=True)


SEEDS = st.lists(st.booleans(), min_size=32, max_size=32).map(
    lambda bits: sum(1 << i for i, bit in enumerate(bits) if bit)
)
"""Uniform 32-bit seeds.

`st.integers` prefers small ones. It also chooses constants of the loaded modules, so that the repeated examples would
differ between runs of one file and of all.
"""


def random_seeds(count: int, *, shares_fixtures: bool = False) -> Callable[[Test], Test]:
    """Test random values of the parameter `seed`: `count` of them with `--all`, a fifth by default, 4 with `--fast`.

    Args:
        count: number of seeds.
        shares_fixtures: the fixtures, which are set up once for all seeds, are factories, or the test does not change
            them.
    """
    suppressed = [HealthCheck.function_scoped_fixture] if shares_fixtures else []
    chosen = settings(
        max_examples=_num_examples(count, fast=4),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller seed is not a simpler example
        suppress_health_check=[*settings().suppress_health_check, *suppressed],
    )
    return lambda test: chosen(given(seed=SEEDS)(test))


def examples(count: int) -> settings:
    """Return the settings of a test of `count` examples with `--all`, a fifth by default, a tenth with `--fast`."""
    return settings(max_examples=_num_examples(count, fast=max(4, count // 10)))


def _num_examples(count: int, fast: int) -> int:
    tier = settings.get_current_profile_name()
    return min(count, {"fast": fast, "default": max(5, count // 5)}.get(tier, count))
