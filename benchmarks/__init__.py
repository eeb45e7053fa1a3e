"""Benchmarks of moeserve; run them from the repository root (README.md has the commands)."""
