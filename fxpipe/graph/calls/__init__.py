"""Calls that graphs contain as they are, opened no further."""
