import pytest
import torch
from torch.nn.attention import flex_attention

from support.families import tiny_model

LLAMA = "llama", {"initializer_range": 0.2, "pad_token_id": None}


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory):
    """A folder with a tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_model(*LLAMA).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def llama():
    return tiny_model(*LLAMA)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Lets the uncompiled function have a gradient on a CPU, which torch refuses it there."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
