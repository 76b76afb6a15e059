"""Move bytes and words between ranks."""
