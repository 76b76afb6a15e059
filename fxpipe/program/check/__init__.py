"""Refuse programs that would compute something else, or hang."""
