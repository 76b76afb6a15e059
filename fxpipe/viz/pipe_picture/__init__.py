"""Lay out and write pictures of pipes."""
