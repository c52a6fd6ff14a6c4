import pytest
import torch
from torch.nn.attention import flex_attention
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


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Lets the uncompiled function have a gradient on a CPU, which torch refuses it there."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


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
