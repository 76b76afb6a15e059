"""Models, pipes and programs by the names that people type."""
