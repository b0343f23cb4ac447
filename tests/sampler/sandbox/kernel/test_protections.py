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
def test_json_round_trip(record: Protections) -> None:
    assert Protections.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"namespaces": []}', '{"seccomp": true, "namespaces": [], "x": 1}']
)
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a record of protections|Expecting value"):
        Protections.from_json(text)


def test_filter_and_second_layer_are_sufficient() -> None:
    for seccomp, abi, namespaces, jail_root in product([True, False], [0, 1], [(), ("net",)], [True, False]):
        record = Protections(seccomp, abi, namespaces, jail_root)
        assert record.sufficient == (seccomp and (abi == 1 or namespaces == ("net",) or jail_root))
        assert (record.missing() == "") == record.sufficient


def test_change_of_user_is_no_second_layer() -> None:
    assert not Protections(seccomp=True, uid_drop=True).sufficient


def test_missing_protections_come_with_a_fix() -> None:
    no_second_layer = Protections(seccomp=True).missing()
    assert "lsm=landlock" in no_second_layer
    assert "kernel.unprivileged_userns_clone=1" in no_second_layer
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in no_second_layer
    assert "seccomp filters: use Linux 5.3 or later" in Protections(seccomp=False, landlock_abi=7).missing()
    for text in (no_second_layer, Protections(seccomp=False).missing()):
        assert text.endswith("--processor-isolation none does without a sandbox.")


def test_describe() -> None:
    everything = Protections(True, 7, ("pid", "net"), True, True)
    assert everything.describe() == (
        "seccomp filter, Landlock (ABI 7), namespaces (pid, net), root directory of its own, change of user"
    )
    assert Protections(True, 0, (), True).describe() == (
        "seccomp filter, root directory of its own; without Landlock, namespaces, change of user"
    )
    assert Protections(False).describe().startswith("nothing; without seccomp filter, ")


def test_probe() -> None:
    assert probe() == Protections(seccomp=True, landlock_abi=landlock.abi())
