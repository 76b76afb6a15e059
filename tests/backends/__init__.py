"""Process-group backends that behave like those of machines we do not have."""
