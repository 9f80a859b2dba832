"""What carries out a rewrite: matching, splicing, retyping, threading, and the check."""
