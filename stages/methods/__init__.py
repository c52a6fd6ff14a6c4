"""The table of methods: each a pure function of log-probabilities."""
