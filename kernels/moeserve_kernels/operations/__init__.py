"""The operations: one signature each, checked arguments, and the choice of a backend."""
