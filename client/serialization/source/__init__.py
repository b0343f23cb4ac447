"""Source text of a class and of everything it uses."""
