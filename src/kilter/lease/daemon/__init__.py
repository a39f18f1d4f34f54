"""`kilter daemon`: sets clocks for users who are not root, by the operator's policy."""
