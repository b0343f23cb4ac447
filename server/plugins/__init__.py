"""Parts that the plugins for other engines share: their settings, and loading the processors of requests."""
