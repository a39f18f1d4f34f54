"""Simulated devices and jobs, in virtual time."""
