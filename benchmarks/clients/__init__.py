"""Unchanged clients from PyPI run against a server; see README.md."""
