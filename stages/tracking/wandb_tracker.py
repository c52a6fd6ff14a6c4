"""Weights & Biases as a tracker: online where somebody is logged in, else an offline run."""

from __future__ import annotations

import glob
import importlib
import netrc
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

from ...schemas.config import TrackingOptions
from ..storage.disk import fs
from .metrics_log import MetricsLine
from .run_record import GROUP_TAG, ROUNDS_TAG, RunFacts, Sent
from .tracker import Tracker, typed

FOLDER = "wandb"  # in the folder of the run, or in WANDB_DIR; wandb names it so
FILES = "align"  # among the files of the run, whose config.yaml is W&B's own
INIT_SECONDS, FINISH_SECONDS = 15.0, 30.0  # of a server that does not answer
MODEL_SECONDS = 6 * 3600.0  # to upload a model
FLUSH_SECONDS = 1.0  # `wandb beta sync --live` reads what is flushed
OPEN_RUNS: dict[str, Any] = {}  # wandb's objects by key: one process cannot open a run twice


class WandbTracker(Tracker):
    """A run of W&B under its key; W&B's own step is made of the line's, so none is there twice."""

    title = "Weights & Biases"
    named_by = "the folder wandb of the run or of WANDB_DIR; WANDB_MODE must not be disabled"
    library = "wandb"
    experiment_variable = "WANDB_PROJECT"
    environment = MappingProxyType({"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"})

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._wandb = importlib.import_module("wandb")
        self._run: Any = None
        self._step = self._first_step = -1
        self._facts = RunFacts()
        self._finish_seconds = FINISH_SECONDS

    @staticmethod
    def address_of(options: TrackingOptions, home: Path) -> str:
        """The folder of wandb's files; none where wandb is disabled."""
        if os.environ.get("WANDB_MODE") == "disabled":
            return ""
        return str(Path(os.environ.get("WANDB_DIR") or home).absolute() / FOLDER)

    @staticmethod
    def plain_address(address: str) -> str:
        """It goes where the run's folder goes, unless WANDB_DIR names another."""
        return address if os.environ.get("WANDB_DIR") else FOLDER

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether nobody has removed the files of an offline run; a server resumes any."""
        return _mode() == "online" or bool(self._folders(facts))

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Resumes the run of that key on a server; an offline run is written anew."""
        self._facts = facts
        self._abandon(facts)
        if _mode() == "offline":
            for folder in self._folders(facts):
                fs.remove_tree(folder)
        group = facts.tags.get(GROUP_TAG) or facts.tags.get(ROUNDS_TAG, "")
        settings = self._wandb.Settings(
            mode=_mode(),
            root_dir=str(Path(self.address).parent),
            init_timeout=INIT_SECONDS,
            finish_timeout=self._finish_seconds,
            finish_timeout_raises=True,  # else what a server did not take would count as sent
            silent=True,
            console="off",
            host="-",  # nothing of the machine is recorded
            disable_git=True,
            disable_code=True,
            save_code=False,
            symlink=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_start_time=facts.began_ms / 1000,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
        )
        Path(self.address).mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._wandb.init(
                id=facts.key,
                resume="allow" if _mode() == "online" else None,
                project=re.sub(r"[/\\#?%:]", "-", facts.stores["wandb"].experiment)[:128],
                name=facts.name or None,
                group=Path(group).name or None,
                job_type=facts.tags.get("align.stage") or None,
                settings=settings,
                reinit="create_new",  # beside a run that somebody else has open here
            )
        except Exception:
            # Its service would take the run for one that is in use. But all runs of the process
            # share it, also the user's own: beside an open one, `align mlflow-sync` sends this one.
            if self._wandb.sdk.wandb_setup.singleton().most_recent_active_run is None:
                self._tear_down()
            raise
        OPEN_RUNS[facts.key] = self._run
        self._run.define_metric("*", step_metric="step")
        self._step, self._first_step = -1, self._run.starting_step
        # All lines come again, and those that the server has are passed over. So do all files:
        # what was noted as sent may only have waited in a process that was killed.
        return Sent(facts.key)

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """A row for each line. The server drops a row whose own step does not rise."""
        for line in lines:
            self._step = max(self._step + 1, 4 * line.step + 2 * line.is_eval)
            if self._step >= self._first_step:
                row = {**line.metrics, "step": line.step, "_timestamp": line.time}
                self._run.log(row, step=self._step, commit=True)

    def label(self, facts: RunFacts) -> None:
        """Everything as config, by which W&B filters."""
        own = {"status": facts.status or "RUNNING", "tags": facts.tags, "data": facts.data()}
        params = {name: typed(value) for name, value in facts.params.items()}
        config = {**params, FILES: {**own, "models": facts.models}}
        self._run.config.update(config, allow_val_change=True)
        if facts.description and not self._run.notes:  # else they may have been edited there
            self._run.notes = facts.description

    def file(self, path: Path, folder: str) -> None:
        """A copy among the files of the run, which takes no room where there can be links.

        Only a model is a folder: it may take long, and a run has its time from its start on.
        """
        if path.is_dir() and _mode() == "online" and self._finish_seconds < MODEL_SECONDS:
            self._finish_seconds = MODEL_SECONDS
            OPEN_RUNS.pop(self._facts.key).finish(exit_code=0)
            self.begin(self._facts, Sent(), path)
        for source in [path] if path.is_file() else sorted(path.rglob("*")):
            if source.is_file():
                target = Path(self._run.dir, FILES, folder, source.relative_to(path.parent))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                try:
                    os.link(source, target)
                except OSError:
                    shutil.copyfile(source, target)
                self._run.save(glob.escape(str(target)), base_path=self._run.dir, policy="now")

    def close(self, facts: RunFacts) -> None:
        """Ends the run; W&B knows only runs that finished and that failed."""
        self._run.finish(exit_code=0 if facts.status == "FINISHED" else 1)
        OPEN_RUNS.pop(facts.key, None)

    def _abandon(self, facts: RunFacts) -> None:
        """Closes the run if a call of it has failed in this process."""
        if run := OPEN_RUNS.pop(facts.key, None):
            try:
                with suppress(TimeoutError):  # what it lost comes again
                    run.finish(exit_code=1)
            except ConnectionError:  # wandb's service has died, and with it all that it had open
                OPEN_RUNS.clear()  # else each of them would end the next service
                self._tear_down()

    def _tear_down(self) -> None:
        with suppress(ConnectionError, SystemExit):  # of a service that has died
            self._wandb.teardown()

    def _folders(self, facts: RunFacts) -> list[Path]:
        return sorted(Path(self.address).glob(f"offline-run-*-{facts.key}*"))


def _mode() -> str:
    """WANDB_MODE, else online where wandb finds a key, as in ~/.netrc after `wandb login`."""
    if mode := os.environ.get("WANDB_MODE"):
        return {"dryrun": "offline", "run": "online"}.get(mode, mode)  # older words of wandb
    server = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(os.environ.get("NETRC")).authenticators(server):
            return "online"
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


TRACKER = WandbTracker
