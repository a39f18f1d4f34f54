"""Frozen values that every layer shares: units, settings, traces, plans, errors, files."""
