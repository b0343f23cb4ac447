"""A package of an author's, which no server has."""
