"""Floor 2: a layout lowered once into plain tables that laws price and the runtime executes."""
