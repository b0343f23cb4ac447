"""Fixtures of tests that run on fakes of several engines."""

from tests.server.sglang.conftest import schedule_batch as schedule_batch
