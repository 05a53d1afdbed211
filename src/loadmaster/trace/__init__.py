"""Floor 3: any module run once on fake tensors, every storage followed."""
