"""What a user reads about a run: summary, report, plots."""
