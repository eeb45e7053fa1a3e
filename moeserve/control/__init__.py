"""Deciding while serving: which experts move where, when, and why."""
