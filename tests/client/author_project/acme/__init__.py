"""A package of the author that no server has."""
