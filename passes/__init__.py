"""Substitute: the rewrites, and the interpreter that splices them into nested jaxprs."""
