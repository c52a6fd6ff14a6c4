"""A reward model as a judge: `align score` over samples, in a folder of its own in the output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...schemas.config import CacheOptions, Config
from ...schemas.data_options import DataOptions
from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.samples import Sampler
from ...stages.judge.judged_rows import SampleRows
from ...stages.model.reference import HfReward
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.output_folder import SCORES
from ..jobs.object_inputs import local_model
from .judges import Judging, RowJudge, Scores, Verdicts, kept_by
from .score_rewards import ROWS as REWARDED
from .score_rewards import Rewarded, rewards_from_model

GROUP = "group_of_samples"  # the column by which scores find their samples again
OPTIONAL = ("tools", "chat_template_kwargs")
SAMPLES, SCORED = "samples.jsonl", "scored"
ROWS = f"{SCORED}/{REWARDED}"


@dataclass(frozen=True)
class RewardJudge(RowJudge):
    """A reward model, known by the digests of its folder."""

    config: Config
    name: str

    @staticmethod
    def require(config: Config, *, has_sampler: bool) -> None:
        """Refuses settings that name no model."""
        if not config.rewards.model:
            raise UsageError("judge.by reward: name the reward model by --reward-model DIR.")

    @staticmethod
    def of(config: Config, columns: Sequence[str], sampler: Sampler | None) -> RewardJudge:
        """Digests its files; loads no weights."""
        model = replace(config.model, path=local_model(config.rewards.model), adapter="")
        return RewardJudge(config, digest(dict(HfReward(model, own_digests()).identity())))

    @property
    def made_from(self) -> Mapping[str, str]:
        """The model."""
        return {"judge": self.name}

    def scores(self, samples: SampleRows, judging: Judging) -> Verdicts[Scores] | None:
        """Of each sample that is not blank; equal ones of a prompt are scored once.

        They are kept in a folder of this model, and used again for samples that have become more.
        """
        home = kept_by(self.config) / "reward" / self.name[:16]
        groups = [*_groups(samples)]
        lines = "".join(f"{json.dumps(group, ensure_ascii=False)}\n" for group in groups).encode()
        folder = home / hashlib.sha256(lines).hexdigest()[:16]
        for path in (*reversed([one for one in home.parents if not one.exists()]), home, folder):
            fs.make_folder(path)
        earlier = [path.parents[1] for path in sorted(home.glob(f"*/{ROWS}"))]
        known = {name for one in earlier for name, _ in _scored(one)}
        if not (folder / SAMPLES).exists():
            fs.publish(folder / SAMPLES, lines)
        made = rewards_from_model(
            _scoring(self.config, folder, [one for one in earlier if one != folder]),
            lambda options: HfReward(options, own_digests()),
            progress=judging.progress,
            part=judging.part,
        )
        if not isinstance(made, Rewarded):
            return None
        found = dict(_scored(folder))
        new = len(found.keys() - known)
        judging.tally.new += new
        judging.tally.known += len(found) - new
        named = ((_name(row, row["completion"]), row) for row in samples.rows)
        return Verdicts(
            {
                (row["prompt_key"], row["number"]): found[name]
                for name, row in named
                if name in found
            }
        )


def _scoring(config: Config, folder: Path, earlier: Sequence[Path]) -> Config:
    """The settings of `align score` over the samples in a folder."""
    return replace(
        config,
        data=DataOptions(files=[str(folder / SAMPLES)], carry=[GROUP], max_bad_frac=1.0),
        cache=CacheOptions(
            reuse=[str(one / SCORED / SCORES) for one in earlier],
            reuse_known=config.cache.reuse_known,
        ),
        rewards=replace(config.rewards, output=str(folder / SCORED)),
        scoring=replace(config.scoring, executor="inline"),  # a judge has parts alone
        tracking=config.tracking.none(),  # the judge has a run of its own
    )


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
