"""Run a pipeline: stages, ranks, steps."""
