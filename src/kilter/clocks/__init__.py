"""Clocks: settings that save energy under a slow-down contract."""
