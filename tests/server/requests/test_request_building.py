from __future__ import annotations

from logitship.server.refusals import BadRequest
from logitship.server.requests.request_building import in_client_words


def test_field_names_are_replaced_except_in_quotes() -> None:
    refused = BadRequest("'min_new_tokens' is over max_new_tokens", param="min_new_tokens")
    in_client_words(refused, {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"})
    assert refused.param == "min_tokens"
    assert refused.message == "min_tokens: 'min_new_tokens' is over max_tokens"
