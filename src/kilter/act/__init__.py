"""Effects: the lease, the session, and what they apply."""
