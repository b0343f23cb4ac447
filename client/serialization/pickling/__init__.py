"""Pickling of classes by value, and unpickling in isolation from this process."""
