"""A request and its sequences, from admission to the last chunk."""
