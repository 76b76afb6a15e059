"""Compute one rank's actions."""
