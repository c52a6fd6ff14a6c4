"""How one thing is done: verbs (prepare, score) and the nouns they use."""
