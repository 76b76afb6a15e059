"""Divide plain numbers among stages."""
