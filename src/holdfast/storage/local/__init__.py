"""Storages whose atomic step is a Python function: memory and SQLite."""
