"""Floor 5: ledgers and timelines for people."""
