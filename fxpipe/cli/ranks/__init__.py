"""Start the ranks of a run, and what each of them does."""
