"""A finished cache to the steps a trainer runs: which rows, in which order, on which rank."""
