"""The rows that a plan is for: those of a cache, or so many that are not there yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...stages.feed.cache_index import RowTable, ShardColumns, unchecked
from ...stages.feed.train_source import open_source
from ...stages.methods.recipe import Recipe
from ...stages.model.loading.load import DTYPES
from ...stages.model.loading.model_folder import model_config, stored_dtype, text_settings
from ..jobs.object_inputs import cache_at, local_model
from .method_needs import read_spec_of
from .workload import RowShape, even_rows

MOST_MADE_ROWS = 100_000


@dataclass(frozen=True)
class GivenRows:
    """Rows that are not there yet: pairs of a prompt and two completions."""

    count: int
    prompt: int
    completion: int


@dataclass(frozen=True)
class PlannedRows:
    """The rows to learn from, the policy, and the tokens that stage 1 scores."""

    table: RowTable
    count: int
    held_out: int
    policy: ModelOptions
    own_tokens: int  # of prompts and completions
    mismatched_tokens: int  # of mismatched completions


def planned_rows(config: Config, recipe: Recipe, given: GivenRows | None) -> PlannedRows:
    """The given rows, or those of the cache."""
    if given:
        if config.train.cache:
            raise UsageError(
                "--rows is for rows that are not there yet. Leave out --cache or --rows."
            )
        return _given(config, recipe, given)
    return _of_cache(config, recipe)


def _of_cache(config: Config, recipe: Recipe) -> PlannedRows:
    cache = cache_at(config.train.cache or config.cache.output)
    manifest = cache.manifest()
    path = local_model(config.train.model or manifest.model)
    read_spec = read_spec_of(recipe, config.train, path)
    source = open_source(cache, manifest, read_spec, ShardColumns(unchecked))
    sizes = [table.sizes for table in (source.train, source.held_out)]
    prompts = sum(int(one.prompt_tokens.sum(dtype="int64")) for one in sizes)
    completions = sum(int(one.own_tokens.sum(dtype="int64")) for one in sizes)
    return PlannedRows(
        table=source.train,
        count=source.train.rows_per_epoch,
        held_out=len(source.held_out),
        policy=replace(config.model, path=path, adapter="", device_map=""),
        own_tokens=prompts + completions,
        mismatched_tokens=source.num_partners * completions,
    )


def _given(config: Config, recipe: Recipe, rows: GivenRows) -> PlannedRows:
    path = config.train.model or config.model.path
    if not path:
        raise UsageError("No policy. Pass --model DIR: a folder with its config.json is enough.")
    branches = 1 if recipe.rows == "imitated" else 2
    shape = RowShape(rows.prompt, (rows.completion,) * branches)
    learned = round(rows.count * (1 - config.train.eval_fraction))
    read = max(1, config.cache.kl_pairs) if "mismatched" in recipe.needs else 0
    return PlannedRows(
        table=even_rows(max(1, min(learned, MOST_MADE_ROWS)), shape, num_partners=read),
        count=max(1, learned),
        held_out=rows.count - learned,
        policy=replace(config.model, path=local_model(path), adapter="", device_map=""),
        # Stage 1 stores both completions, whatever a method reads of them.
        own_tokens=rows.count * (rows.prompt + 2 * rows.completion),
        mismatched_tokens=rows.count * 2 * rows.completion * config.cache.kl_pairs,
    )


def known_dtype(folder: str, asked: str) -> str:
    """The dtype of the settings, else of the weights, else of config.json."""
    if asked != "auto":
        return asked
    if any(Path(folder).glob("*.safetensors")):
        return stored_dtype(folder)
    config = text_settings(model_config(folder))
    said = str(config.get("dtype") or config.get("torch_dtype"))
    if said not in DTYPES:
        raise UsageError(
            f"{folder}: neither weights nor config.json say the dtype. Pass --dtype bfloat16."
        )
    return said
