"""A backward in two halves: gradients of inputs now, those of weights later."""
