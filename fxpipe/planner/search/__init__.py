"""Find the best candidate among ways to split."""
