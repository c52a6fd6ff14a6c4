"""A verifier for untrained models: it prefers completions with many different letters."""

CALLS = []  # prompt and completion of each call in this process


def score(prompt, completion, row):
    """How many different letters a completion has."""
    CALLS.append((row["prompt_key"], completion))
    return len({letter for letter in completion if letter.isalpha()})
