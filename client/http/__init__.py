"""HTTP requests and responses: build, send, parse."""
