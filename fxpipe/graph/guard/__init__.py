"""What opened code read of the Python world: noted in the trace, compared before each use."""
