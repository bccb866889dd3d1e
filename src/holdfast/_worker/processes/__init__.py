"""Runs in child processes: the pool, the two sides of a child, and their messages."""
