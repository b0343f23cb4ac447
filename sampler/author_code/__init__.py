"""Code that an author wrote, called in this process: guarded calls, and request-level callables."""
