"""Floor 6: one file a command: parse, call, print."""
