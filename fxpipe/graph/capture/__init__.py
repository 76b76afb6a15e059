"""Turn a model and its example inputs into a `TracedGraph`."""
