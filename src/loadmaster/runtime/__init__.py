"""Floor 3: the same tables executed on torch.distributed."""
