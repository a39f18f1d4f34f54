"""Looking at a running job without touching its source."""
