"""Models: the reference, the policy, reward models, and their log-probabilities."""
