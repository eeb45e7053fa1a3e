"""The HTTP process: OpenAI-compatible routes in front of the ranks. Never loads torch."""
