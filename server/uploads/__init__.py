"""The routes of uploads, `/v1/processors` and `/v1/artifacts`, on logitship's server and inside other engines."""
