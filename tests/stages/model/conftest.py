import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory):
    """A folder with a tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def llama():
    return tiny_llama()


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()
