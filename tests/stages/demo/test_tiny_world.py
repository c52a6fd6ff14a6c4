from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

import pytest

from align.schemas.errors import UsageError
from align.stages.demo.tiny_world import TinyWorld, make_world

if TYPE_CHECKING:
    from pathlib import Path


def test_every_path_a_world_names_exists(pretrained_world: TinyWorld) -> None:
    assert all(
        path.exists()
        for path in (
            pretrained_world.model,
            pretrained_world.tokenizer,
            *astuple(pretrained_world.data),
        )
    )


def test_the_model_folder_holds_the_tokenizer_too(pretrained_world: TinyWorld) -> None:
    for path in pretrained_world.tokenizer.iterdir():
        assert path.read_bytes() == (pretrained_world.model / path.name).read_bytes()


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        make_world(tmp_path, rows=5, pretrain_steps=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
