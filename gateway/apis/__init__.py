"""Other APIs that clients speak, translated to and from chat completions. Pure."""
