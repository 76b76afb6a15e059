"""Programs as text, as JSON, and in the words of torch."""
