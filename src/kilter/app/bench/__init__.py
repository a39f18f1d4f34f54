"""One file per table of the README."""
