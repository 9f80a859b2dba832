"""Random programs that hold the passes' patterns and near misses, and what must be true of them."""
