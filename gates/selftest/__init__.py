"""The comparator put to the test: changes that it must see, and noise that it must not."""
