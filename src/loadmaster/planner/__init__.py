"""Floor 4: the space of layouts, priced, ranked and explained."""
