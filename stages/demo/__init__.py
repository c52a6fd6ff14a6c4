"""Makes the folder of `align tiny-world`: preference data, a tokenizer and a model."""
