"""Input sizes as symbols, output sizes as formulas of them."""
