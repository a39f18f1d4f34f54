"""The lease: the only way to a setter, and what puts settings back."""
