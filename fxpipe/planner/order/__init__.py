"""Find a better order of actions."""
