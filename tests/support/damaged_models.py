"""The files of a model folder."""

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG, ADAPTER = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
