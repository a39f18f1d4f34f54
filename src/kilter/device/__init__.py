"""Devices: one protocol (`base`), one file per vendor."""
