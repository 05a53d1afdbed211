"""Floor 3: what devices and links really do."""
