"""Per-site evidence: each rewrite of a program, run against what it replaced."""
