"""Runs the processors of requests inside an engine, whose adapter takes the `EngineSeat`."""
