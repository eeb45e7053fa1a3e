"""``python -m moeserve`` is the ``moeserve`` command."""

from moeserve.cli.main import main

main()
