"""Other scores and baselines than `ctx-compress eval` has."""
