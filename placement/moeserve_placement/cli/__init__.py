"""The command line: thin, over the library. click and rich are imported only here."""
