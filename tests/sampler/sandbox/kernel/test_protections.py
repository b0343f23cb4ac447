from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.sandbox.kernel import landlock
from logitship.sampler.sandbox.kernel.protections import Protections, probe

RECORDS = st.builds(
    Protections,
    seccomp=st.booleans(),
    landlock_abi=st.integers(0, 9),
    namespaces=st.lists(st.sampled_from(["user", "pid", "mount", "net"]), unique=True).map(tuple),
    jail_root=st.booleans(),
    uid_drop=st.booleans(),
)


@given(RECORDS)
def test_it_survives_its_journey(record: Protections) -> None:
    assert Protections.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"namespaces": []}', '{"seccomp": true, "namespaces": [], "x": 1}']
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a record of protections|Expecting value"):
        Protections.from_json(text)


def test_a_filter_and_one_more_mechanism_suffice() -> None:
    for seccomp, abi, namespaces, jail_root in product([True, False], [0, 1], [(), ("net",)], [True, False]):
        record = Protections(seccomp, abi, namespaces, jail_root)
        assert record.sufficient == (seccomp and (abi == 1 or namespaces == ("net",) or jail_root))
        assert (record.missing() == "") == record.sufficient


def test_a_change_of_user_does_not_count() -> None:
    assert not Protections(seccomp=True, uid_drop=True).sufficient


def test_what_is_missing_is_said_with_what_to_do() -> None:
    without_border = Protections(seccomp=True).missing()
    assert "lsm=landlock" in without_border
    assert "kernel.unprivileged_userns_clone=1" in without_border
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in without_border
    assert "seccomp" in Protections(seccomp=False, landlock_abi=7).missing()
    for text in (without_border, Protections(seccomp=False).missing()):
        assert text.endswith("--processor-isolation none does without a sandbox.")


def test_it_describes_itself_on_a_line() -> None:
    everything = Protections(True, 7, ("pid", "net"), True, True)
    assert everything.describe() == (
        "seccomp filter, Landlock (ABI 7), namespaces (pid, net), root directory of its own, change of user"
    )
    assert Protections(True, 0, (), True).describe() == (
        "seccomp filter, root directory of its own; without Landlock, namespaces, change of user"
    )
    assert Protections(False).describe().startswith("nothing; without seccomp filter, ")


def test_a_probe_changes_nothing_and_finds_what_is_there() -> None:
    assert probe() == Protections(seccomp=True, landlock_abi=landlock.abi())
