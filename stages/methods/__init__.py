"""The table of methods; each is a pure function of log-probabilities."""
