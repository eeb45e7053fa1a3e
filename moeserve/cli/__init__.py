"""The command line: ``moeserve serve``, ``generate``, ``chat``."""
