"""Floor 1: frozen values that describe a model, a machine, a workload, a layout."""
