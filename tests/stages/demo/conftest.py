from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from align.stages.demo.tiny_world import TinyWorld, make_world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def pretrained_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_world(tmp_path_factory.mktemp("world"), rows=300, pretrain_steps=30)


@pytest.fixture(scope="session")
def tokenizer(pretrained_world: TinyWorld) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(pretrained_world.tokenizer)
