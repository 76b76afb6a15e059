"""fxpipe."""
