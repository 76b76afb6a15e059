"""Pictures as data, and the files they become."""
