"""Pallas kernels that passes substitute: one folder each, with reference, TPU code and API."""
