"""The only place that imports ``jax._src`` or branches on the jax version."""
