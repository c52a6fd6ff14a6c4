"""A whole world in one folder: tokenizer, model and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import UsageError
from ..storage import fs
from .data import DataFiles, make_data
from .model import DEFAULT_SHAPE, ModelShape, Pretraining, make_model
from .tokenizer import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class World:
    """Where everything lies, and how well the model knows the language."""

    folder: Path
    model: Path  # weights, config, generation config and tokenizer
    tokenizer: Path  # the tokenizer alone
    data: DataFiles
    pretraining: Pretraining


def make_world(
    folder: Path,
    *,
    rows: int = 2000,
    seed: int = 0,
    shape: ModelShape = DEFAULT_SHAPE,
    pretrain_steps: int = 80,
) -> World:
    """Makes a world in a new folder, which exists only once everything in it does."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty. Remove it, or name another folder.")
    with fs.new_folder(folder.absolute()) as building:
        tokenizer = make_tokenizer(building / "tokenizer")
        pretraining = make_model(
            building / "model", tokenizer, shape=shape, pretrain_steps=pretrain_steps, seed=seed
        )
        make_data(building / "data", rows=rows, seed=seed)
    return World(
        folder=folder,
        model=folder / "model",
        tokenizer=folder / "tokenizer",
        data=DataFiles.under(folder / "data"),
        pretraining=pretraining,
    )
