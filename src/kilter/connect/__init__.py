"""Ways in: the script launcher and the frameworks."""
