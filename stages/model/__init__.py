"""The one function that turns a model and branches into log-probabilities, and its reference."""
