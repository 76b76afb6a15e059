"""LIVE with it: state, loops, generation and precision over schedules."""
