"""The life of one run."""
