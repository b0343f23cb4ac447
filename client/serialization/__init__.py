"""From a class to a processor string, and back."""
