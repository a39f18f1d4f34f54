"""The command line, the report, the metrics."""
