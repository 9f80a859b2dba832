"""One thin module per command; rich for people, JSON for machines."""
