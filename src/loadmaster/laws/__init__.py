"""Floor 3: pure functions from tables to bytes, seconds and FLOPs; they broadcast over NumPy arrays."""
