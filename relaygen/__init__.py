"""RelayGen's algorithm: one generation written by two models. Pure: no I/O, no clock."""
