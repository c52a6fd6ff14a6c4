"""The rows that a plan is for: those of a cache, or so many that are not there yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...stages.feed.cache_index import RowSizes, RowTable, ShardColumns, unchecked
from ...stages.feed.train_source import open_source
from ...stages.methods.recipe import Recipe
from ...stages.model.loading.load import DTYPES
from ...stages.model.loading.model_folder import model_config, stored_dtype, text_settings
from ...stages.pairing.partition import number_of_ranges, number_of_shards
from ...stages.storage.cache.manifest_file import load_manifest
from ..jobs.object_inputs import cache_at, local_model
from .method_needs import read_spec_of
from .scoring_plan import Scoring, ScoringSettings
from .workload import RowShape, even_rows

MOST_MADE_ROWS = 100_000
BYTES_PER_TOKEN = 4  # of text, about


@dataclass(frozen=True)
class GivenRows:
    """Rows that are not there yet: pairs of a prompt and two completions."""

    count: int
    prompt: int
    completion: int


@dataclass(frozen=True)
class PlannedRows:
    """The rows to learn from, the policy, and stage 1 over all of them."""

    table: RowTable
    count: int
    held_out: int
    policy: ModelOptions
    scoring: Scoring


def planned_rows(
    config: Config, recipe: Recipe, given: GivenRows | None, device: str
) -> PlannedRows:
    """The given rows, or those of the cache."""
    if given:
        if config.train.cache:
            raise UsageError(
                "--rows is for rows that are not there yet. Leave out --cache or --rows."
            )
        return _given(config, recipe, given, device)
    return _of_cache(config, recipe, device)


def _of_cache(config: Config, recipe: Recipe, device: str) -> PlannedRows:
    cache = cache_at(config.train.cache or config.cache.output)
    manifest = load_manifest(cache)
    path = local_model(config.train.model or manifest.model)
    read_spec = read_spec_of(recipe, config.train, path)
    index = open_source(cache, manifest, read_spec, ShardColumns(unchecked)).index
    sizes = RowSizes.concat([table.sizes for table in (index.train, index.held_out)])
    prompts, completions = (
        int(tokens.sum(dtype="int64")) for tokens in (sizes.prompt_tokens, sizes.own_tokens)
    )
    reference = manifest.model if config.train.model else path
    settings = ScoringSettings(
        reference=replace(config.model, path=reference, adapter=manifest.adapter),
        dtype=manifest.fingerprint["model.dtype"],
        device=device,
        num_pairs=index.num_partners,
        tokens_per_batch=config.scoring.tokens_per_batch,
        rows_per_shard=max((1, *(shard.rows for shard in manifest.shards))),
    )
    own, mismatched = prompts + completions, index.num_partners * completions
    return PlannedRows(
        table=index.train,
        count=index.train.rows_per_epoch,
        held_out=len(index.held_out),
        policy=replace(config.model, path=path, adapter="", device_map=""),
        scoring=Scoring(own, mismatched, sizes, settings),
    )


def _given(config: Config, recipe: Recipe, rows: GivenRows, device: str) -> PlannedRows:
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
        scoring=_scoring_of_given(config, rows, local_model(config.model.path or path), device),
    )


def _scoring_of_given(config: Config, rows: GivenRows, path: str, device: str) -> Scoring:
    """Stage 1 stores both completions, whatever a method reads of them."""
    stored, num_pairs = RowShape(rows.prompt, (rows.completion,) * 2), config.cache.kl_pairs
    own, asked = rows.count * stored.tokens, config.cache.shards
    ranges = number_of_ranges(BYTES_PER_TOKEN * own, asked)
    shard = -(-rows.count // number_of_shards(ranges, rows.count, asked))
    settings = ScoringSettings(
        reference=replace(config.model, path=path),
        dtype=known_dtype(path, config.model.dtype, otherwise=config.train.dtype),
        device=device,
        num_pairs=num_pairs,
        tokens_per_batch=config.scoring.tokens_per_batch,
        rows_per_shard=shard,
    )
    mismatched = rows.count * 2 * rows.completion * num_pairs
    sizes = even_rows(shard, stored, num_partners=0).sizes
    return Scoring(own, mismatched, sizes, settings)


def known_dtype(folder: str, asked: str, *, otherwise: str = "auto") -> str:
    """The dtype of the settings, else of the weights, else of config.json, else `otherwise`."""
    if asked != "auto":
        return asked
    if any(Path(folder).glob("*.safetensors")):
        return stored_dtype(folder)
    config = text_settings(model_config(folder))
    said = str(config.get("dtype") or config.get("torch_dtype") or otherwise)
    if said not in DTYPES:
        raise UsageError(
            f"{folder}: neither weights nor config.json say the dtype. Pass --dtype bfloat16."
        )
    return said
