"""kilter keeps GPU training and inference in kilter. See `kilter --help` or the README."""

__version__ = "0.1.0"
