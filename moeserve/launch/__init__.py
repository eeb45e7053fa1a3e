"""Starts and watches processes: ranks, HTTP processes, or one rank of a launcher's job."""
