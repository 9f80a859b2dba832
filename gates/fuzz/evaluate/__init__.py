"""Evaluate jaxprs operation by operation in numpy, as StableHLO states what each computes."""
