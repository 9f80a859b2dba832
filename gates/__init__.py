"""Turn verdicts into exit codes: the identity matrix and its guards."""
