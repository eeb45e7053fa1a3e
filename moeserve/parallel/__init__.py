"""Ranks and what they send each other: groups, the per-step agreement, dispatch and combine."""
