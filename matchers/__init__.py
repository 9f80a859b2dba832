"""Recognise: dataflow view, patterns that explain a mismatch, facts about values."""
