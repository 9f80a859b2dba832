"""What several passes share: requirements, and the operations their replacements are made of."""
