"""Measurements of this package against other ways to do the same."""
