"""A reward model as a judge: `align score` over samples, in a folder of its own in the output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..schemas.config import CacheOptions, Config, DataOptions
from ..schemas.errors import UsageError
from ..stages.judge.judged_rows import SampleRows
from ..stages.storage import fs
from ..stages.storage.cache_folder import SCORES
from ..stages.tracking.progress import Progress
from .executors.executor import Share
from .object_inputs import local_model
from .score_rewards import ROWS as REWARDED
from .score_rewards import Rewarded, rewards_from_model

GROUP = "group_of_samples"  # the column by which scores find their samples again
OPTIONAL = ("tools", "chat_template_kwargs")
SAMPLES, SCORED = "samples.jsonl", "scored"
ROWS = f"{SCORED}/{REWARDED}"


def reward_identity(config: Config) -> dict[str, str]:
    """Digests of the reward model; loads no weights."""
    # They import torch, which a judge behind a server does without.
    from ..stages.model.reward_model import HfReward  # noqa: PLC0415
    from ..stages.storage.digest_memory import own_digests  # noqa: PLC0415

    if not config.rewards.model:
        raise UsageError("judge.by reward: name the reward model by --reward-model DIR.")
    path = local_model(config.rewards.model)
    model = replace(config.model, path=path, adapter="")
    return dict(HfReward(model, own_digests()).identity())


@dataclass(frozen=True)
class RewardScores:
    """The score of each sample that is not blank; equal ones of a prompt are scored once."""

    scores: Mapping[tuple[str, int], float]
    new: int
    known: int


def reward_scores(
    config: Config, samples: SampleRows, home: Path, *, progress: Progress, share: Share | None
) -> RewardScores | None:
    """Scores samples by the reward model, in a folder of this model; None while parts are missing.

    What earlier runs scored there is used again, also for samples that have become more.
    """
    from ..stages.model.reward_model import HfReward  # noqa: PLC0415 - as above
    from ..stages.storage.digest_memory import own_digests  # noqa: PLC0415

    groups = [*_groups(samples)]
    lines = "".join(f"{json.dumps(group, ensure_ascii=False)}\n" for group in groups).encode()
    folder = home / hashlib.sha256(lines).hexdigest()[:16]
    for path in (*reversed([one for one in home.parents if not one.exists()]), home, folder):
        fs.make_folder(path)
    earlier = [path.parents[1] for path in sorted(home.glob(f"*/{ROWS}"))]
    known = {name for one in earlier for name, _ in _scored(one)}
    if not (folder / SAMPLES).exists():
        fs.publish(folder / SAMPLES, lines, label="config")
    scoring = replace(
        config,
        data=DataOptions(files=[str(folder / SAMPLES)], carry=[GROUP], max_bad_frac=1.0),
        cache=CacheOptions(
            reuse=[str(one / SCORED / SCORES) for one in earlier if one != folder],
            reuse_known=config.cache.reuse_known,
        ),
        rewards=replace(config.rewards, output=str(folder / SCORED)),
        tracking=replace(config.tracking, mlflow=False),  # the judge has a run of its own
    )
    made = rewards_from_model(
        scoring, lambda options: HfReward(options, own_digests()), progress=progress, share=share
    )
    if not isinstance(made, Rewarded):
        return None
    found = dict(_scored(folder))
    named = ((_name(row, row["completion"]), row) for row in samples.rows)
    scores = {
        (row["prompt_key"], row["number"]): found[name] for name, row in named if name in found
    }
    new = len(found.keys() - known)
    return RewardScores(scores, new, len(found) - new)


def _groups(samples: SampleRows) -> Iterator[dict[str, Any]]:
    """The rows to score: each prompt with its different samples."""
    groups: dict[str, dict[str, Any]] = {}
    for row, one in zip(samples.rows, samples.candidates, strict=True):
        if not one.text or one.text.isspace():
            continue
        new = {"prompt_key": row["prompt_key"], "prompt": row["prompt"], "completions": []}
        new |= {name: row[name] for name in OPTIONAL if row.get(name)} | {GROUP: len(groups)}
        group = groups.setdefault(row["prompt_key"], new)
        if row["completion"] not in group["completions"]:
            group["completions"].append(row["completion"])
    yield from groups.values()


def _scored(folder: Path) -> Iterator[tuple[str, float]]:
    """The name and the score of each sample in what `align score` wrote."""
    with (folder / SAMPLES).open(encoding="utf-8") as lines:
        groups = [json.loads(line) for line in lines]
    with (folder / ROWS).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            group = groups[int(row[GROUP])]
            for completion, score in zip(group["completions"], row["scores"], strict=True):
                yield _name(group, completion), score


def _name(row: Mapping[str, Any], completion: Any) -> str:
    return f"{row['prompt_key']} {json.dumps(completion, sort_keys=True)}"
