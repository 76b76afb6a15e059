"""Let all ranks go on, or all raise."""
