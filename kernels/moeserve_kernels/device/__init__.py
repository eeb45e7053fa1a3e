"""Triton kernels and what launches them; nothing here checks arguments."""
