"""The requests' own processors: executors, groups of rows, and the batch processor that runs them."""
