"""Checks on a GPU that training through the cache is exact, and measures what it costs there."""
