"""Each operation in torch for the CPU, fast enough to be used."""
