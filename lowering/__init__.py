"""Lower for a TPU target on a CPU host, normalise, store and compare programs."""
