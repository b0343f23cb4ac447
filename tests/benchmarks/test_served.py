"""The client of the benchmarks with a real server; the figures themselves are not tested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from served import Client, gaps_while_all_run

STEPS = 'logitship_step_phase_duration_seconds_count{phase="forward"}'


@pytest.fixture(scope="module")
def client(loaded_model: LoadedModel) -> Iterator[Client]:
    config = ServerConfig(port=0, log_level="error", max_num_seqs=2)
    with running_server(config, build_engine(config, loaded_model)) as url:
        port = urlsplit(url).port
        assert port is not None
        yield Client(port)


def generation(tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": [5, 6, 7], "sampling_params": sampling, **more}


def test_each_token_arrives_after_the_one_before(client: Client) -> None:
    arrivals = client.stream("/generate", [generation(9), generation(4)])
    assert [len(times) for times in arrivals] == [1 + 9, 1 + 4]
    assert all(times == sorted(times) for times in arrivals)


def test_next_request_is_sent_after_a_response_ends(client: Client) -> None:
    arrivals = client.stream("/generate", [generation(tokens) for tokens in (3, 5, 2)], at_a_time=1)
    assert [len(times) for times in arrivals] == [1 + 3, 1 + 5, 1 + 2]
    assert all(earlier[-1] <= later[0] for earlier, later in pairwise(arrivals))


def test_openai_events_are_counted_too(client: Client) -> None:
    # With log-probabilities, a token that ends no character has an event, too.
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    (arrivals,) = client.stream("/v1/completions", [body])
    assert len(arrivals) == 1 + 6


def test_refused_request_raises(client: Client) -> None:
    with pytest.raises(RuntimeError, match="max_new_tokens"):
        client.stream("/generate", [generation(2), generation(-2)])


def test_metrics_by_name_and_labels(client: Client) -> None:
    client.stream("/generate", [generation(5)])
    # The last step of an answer is counted after its token was sent, and the steps of the answer before are by then.
    before = client.metrics()[STEPS]
    client.stream("/generate", [generation(5)])
    assert client.metrics()[STEPS] - before in (4, 5, 6)


def test_only_gaps_while_all_streams_run_are_counted() -> None:
    arrivals = [[0.0, 1.0, 2.0, 4.0, 7.0], [0.5, 1.5, 3.5, 6.5], [0.0, 0.5, 2.5, 5.5, 8.5]]
    assert gaps_while_all_run(arrivals) == [[2.0], [2.0, 3.0], [3.0]]
