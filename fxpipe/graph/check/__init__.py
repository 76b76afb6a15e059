"""Does the pipe do what the plain model does? Run both and compare."""
