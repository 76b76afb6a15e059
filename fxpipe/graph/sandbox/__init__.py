"""Run the user's code and leave no trace of the run."""
