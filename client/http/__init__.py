"""Build a request, send it, parse the response."""
