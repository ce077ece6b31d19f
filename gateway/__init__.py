"""The gateway: all I/O around the sans-IO core in `relaygen`."""
