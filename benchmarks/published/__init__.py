"""Published training runs, and what the planner says about them."""
