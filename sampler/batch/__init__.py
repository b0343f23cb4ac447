"""The persistent batch: its rows and the changes of each step."""
