"""Policies of fair sharing: pure functions from a snapshot of the machine to data ratios."""
