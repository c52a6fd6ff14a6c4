"""A reward model as a judge; it scores samples as `align score` scores data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...schemas.config import CacheOptions, Config
from ...schemas.data_options import DataOptions
from ...schemas.errors import UsageError, os_errors_as_storage_errors
from ...schemas.json_codec import digest
from ...stages.storage.disk import fs
from ...stages.storage.output_folder import SCORES
from ...stages.storage.tables import TableFolder
from ..jobs.object_inputs import local_model
from .judges import Candidate, Columns, Judge, JudgeContext, PartsPending
from .score_rewards import open_reward_model, score_data

OPTIONAL = ("tools", "chat_template_kwargs")


def reward_judge(config: Config) -> Judge:
    """The reward model of the settings; the digests of its files identify it."""
    if not config.rewards.model:
        raise UsageError("judge.by reward needs a model. Name its folder by --reward-model DIR.")
    rewards = replace(config.rewards, model=local_model(config.rewards.model))
    model = replace(config.model, path=rewards.model, adapter="")
    name = digest(dict(open_reward_model(model).identity()))
    return Judge({"judge": name}, partial(_columns, replace(config, rewards=rewards), name))


def _columns(
    config: Config, name: str, candidates: Sequence[Candidate], context: JudgeContext
) -> Columns:
    """The score of each sample that is not blank; equal samples of a prompt share one score."""
    # One row of data per prompt, with its distinct samples.
    prompts: dict[str, dict[str, Candidate]] = {}
    for one in candidates:
        if one.text.strip():
            prompts.setdefault(one.prompt_key, {}).setdefault(_content(one), one)
    rows = []
    for own in prompts.values():
        first = next(iter(own.values())).row
        row = {
            "prompt": first["prompt"],
            "completions": [one.row["completion"] for one in own.values()],
        }
        row |= {column: first[column] for column in OPTIONAL if first.get(column)}
        rows.append(f"{json.dumps(row, ensure_ascii=False)}\n")
    if not rows:
        return {"score": [None] * len(candidates)}

    # Each set of samples has a cache of scores below the model's folder, and reuses the others.
    answers = TableFolder.at(config.judge.output, "judged").answers(config.judge.answers)
    home = answers / "reward" / name[:16]
    lines = "".join(rows).encode()
    folder = home / hashlib.sha256(lines).hexdigest()[:16]
    samples = folder / "samples.jsonl"
    with os_errors_as_storage_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not samples.exists():
        fs.publish(samples, lines)
    earlier = [one.parent for one in sorted(home.glob(f"*/{SCORES}/manifest.json"))]
    result, frame = score_data(
        replace(
            config,
            data=DataOptions(files=[str(samples)], max_bad_frac=1.0),
            cache=CacheOptions(
                reuse=[str(one) for one in earlier if one.parent != folder],
                reuse_known=config.cache.reuse_known,
            ),
            scoring=replace(config.scoring, executor="inline"),  # judging is spread by parts only
            tracking=config.tracking.none(),  # the run of judging covers it
        ),
        folder / SCORES,
        open_reward_model,
        progress=context.progress,
        part=context.part,
    )
    if frame is None:
        raise PartsPending
    scores: dict[tuple[str, str], float] = {}
    keys = [*prompts]
    for row, row_scores in frame.select("row", "scores").iter_rows():
        key = keys[row]
        for content, score in zip(prompts[key], row_scores, strict=True):
            scores[key, content] = score
    context.counts.new += result.counts.scored
    context.counts.known += len(scores) - result.counts.scored
    return {"score": [scores.get((one.prompt_key, _content(one))) for one in candidates]}


def _content(one: Candidate) -> str:
    return json.dumps(one.row["completion"], sort_keys=True)
