"""Conformance suites, shipped so that outsiders can test their own back ends."""
