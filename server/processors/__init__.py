"""The processors of requests: registered, installed, named, and loaded."""
