"""The Weights & Biases tracker: online if the user is logged in, else an offline run."""

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

FOLDER = "wandb"  # wandb's own name; in the run's folder, or in WANDB_DIR
FILES = "align"  # folder of our files in the run, because config.yaml is W&B's own
INIT_SECONDS, FINISH_SECONDS = 15.0, 30.0  # timeouts for a server that does not answer
MODEL_SECONDS = 6 * 3600.0  # timeout for uploading a model
FLUSH_SECONDS = 1.0  # `wandb beta sync --live` reads only flushed data
OPEN_RUNS: dict[str, Any] = {}  # wandb runs by key, because a process cannot open a run twice


class WandbTracker(Tracker):
    """A W&B run with the run's key as its id; W&B's step is computed from the line's step."""

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
        """The folder of wandb's files; empty if wandb is disabled."""
        if os.environ.get("WANDB_MODE") == "disabled":
            return ""
        return str(Path(os.environ.get("WANDB_DIR") or home).absolute() / FOLDER)

    @staticmethod
    def plain_address(address: str) -> str:
        """The folder relative to the run's, unless WANDB_DIR names another."""
        return address if os.environ.get("WANDB_DIR") else FOLDER

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether the files of an offline run still exist; an online run can always be resumed."""
        return _mode() == "online" or bool(self._folders(facts))

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Resumes the run with this key on the server; an offline run is written from the start."""
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
            finish_timeout_raises=True,  # else data that did not arrive would count as sent
            silent=True,
            console="off",
            host="-",  # no data about the machine is recorded
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
                reinit="create_new",  # the user's own code may have another run open
            )
        except Exception:
            # wandb's service would treat the run as one in use, so it is shut down, unless the
            # user's own code has a run open in it. Then `align mlflow-sync` sends this run later.
            if self._wandb.sdk.wandb_setup.singleton().most_recent_active_run is None:
                self._tear_down()
            raise
        OPEN_RUNS[facts.key] = self._run
        self._run.define_metric("*", step_metric="step")
        self._step, self._first_step = -1, self._run.starting_step
        # All lines and files are sent again, because data that was noted as sent may have waited
        # in a process that was killed. `log` skips the lines that the server has.
        return Sent(facts.key)

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """Sends a row per line, with rising steps, because the server drops any other row."""
        for line in lines:
            self._step = max(self._step + 1, 4 * line.step + 2 * line.is_eval)
            if self._step >= self._first_step:
                row = {**line.metrics, "step": line.step, "_timestamp": line.time}
                self._run.log(row, step=self._step, commit=True)

    def label(self, facts: RunFacts) -> None:
        """Writes everything into the config, by which W&B filters runs."""
        own = {"status": facts.status or "RUNNING", "tags": facts.tags, "data": facts.data()}
        params = {name: typed(value) for name, value in facts.params.items()}
        config = {**params, FILES: {**own, "models": facts.models}}
        self._run.config.update(config, allow_val_change=True)
        if facts.description and not self._run.notes:  # the user may have edited them in W&B
            self._run.notes = facts.description

    def file(self, path: Path, folder: str) -> None:
        """Links or copies a file or folder into the files of the run.

        Only a model is a folder. Its upload may take hours, and a run's timeout is fixed at its
        start, so the run is closed and opened again with a longer one.
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
        """Ends the run; W&B has only the statuses finished and failed."""
        self._run.finish(exit_code=0 if facts.status == "FINISHED" else 1)
        OPEN_RUNS.pop(facts.key, None)

    def _abandon(self, facts: RunFacts) -> None:
        """Closes the run if one of its calls has failed in this process."""
        if run := OPEN_RUNS.pop(facts.key, None):
            try:
                with suppress(TimeoutError):  # lost data is sent again
                    run.finish(exit_code=1)
            except ConnectionError:  # wandb's service has died, with all its runs
                OPEN_RUNS.clear()  # closing them would end the next service
                self._tear_down()

    def _tear_down(self) -> None:
        with suppress(ConnectionError, SystemExit):  # the service may have died
            self._wandb.teardown()

    def _folders(self, facts: RunFacts) -> list[Path]:
        return sorted(Path(self.address).glob(f"offline-run-*-{facts.key}*"))


def _mode() -> str:
    """WANDB_MODE, else online if wandb finds a key, such as that of `wandb login` in ~/.netrc."""
    if mode := os.environ.get("WANDB_MODE"):
        return {"dryrun": "offline", "run": "online"}.get(mode, mode)  # wandb's older names
    server = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(os.environ.get("NETRC")).authenticators(server):
            return "online"
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


TRACKER = WandbTracker
