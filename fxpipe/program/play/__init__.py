"""Play programs in time, by number and quickly."""
