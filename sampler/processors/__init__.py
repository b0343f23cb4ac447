"""Processors that come with requests: groups, executors, and the calls into author code."""
