"""Floor 5: plans in the configuration of other frameworks."""
