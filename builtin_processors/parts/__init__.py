"""Building blocks shared by several built-in processors."""
