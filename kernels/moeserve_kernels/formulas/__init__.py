"""Each operation as its formula in plain torch: the oracle of the tests, float64 included."""
