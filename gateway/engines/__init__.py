"""Engines: one upstream model server each, whatever its dialect."""
