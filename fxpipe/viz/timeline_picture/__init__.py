"""Lay out and write pictures of timelines."""
