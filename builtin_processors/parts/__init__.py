"""What several built-in processors are made of."""
