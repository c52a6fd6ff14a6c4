"""Records a training: metrics, tables, trackers, checkpoints, and the final status."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from ...schemas.batches import EvalSample, RowMargins
from ...schemas.cache import StopTokens
from ...schemas.checkpoint import RunEnding, RunStatus, State
from ...schemas.errors import AlignError, Interrupted, StorageError, counted, log_failure
from ...schemas.safe_text import redacted
from ...stages.engine.distributed import run_on_rank_zero
from ...stages.storage.disk import fs
from ...stages.storage.disk.lines import Lines
from ...stages.storage.locations import is_remote, origin_of
from ...stages.storage.run.run_folder import ENDINGS
from ...stages.tracking.metrics_log import prefix_of
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import Run as TrackedRun
from ...stages.tracking.run import inherited, open_training_run
from ...stages.tracking.run_record import NUMBERS_TAG, ROUND_TAG, TRIAL_TAG, WARNINGS_TAG, Status
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ...stages.train.patience import why_unmeasured
from ..options.settings import flatten, without_secrets
from .checkpoint import add_evaluation, require_disk_space, save_state
from .resume import identity_of, numbers_of

if TYPE_CHECKING:
    from ...stages.report.eval_table import Decode, Kind
    from .setup import Run

logger = logging.getLogger("align")

SECONDS_PER_LINE = 5.0
SHOWN = ("loss", "rewards/margins", "rewards/accuracies", "log_odds/accuracy", "grad_norm", "lr")
MOST_FAILURES = 3  # checkpoints in a row that could not be saved
ALWAYS = ("train.lr", "train.batch_size", "train.epochs")  # settings shown in a tracker
PLACES = ("train.cache", "train.model", "train.output")


@contextmanager
def open_records(run: Run, progress: Progress) -> Iterator[RunRecords]:
    """Opens a run's records: rank zero writes metrics and tables, every rank saves checkpoints."""
    folder, state = run.folder, run.checkpoint.state if run.checkpoint else None
    tracked = TrackedRun(folder)
    if run.world.rank == 0:
        keep_through = state.step if state else -1
        folder.drop_evaluations(after=keep_through)
        fs.unlink(folder.rows)
        for path in folder.rows_written():
            from ...stages.report.row_margins import cut_margins  # noqa: PLC0415 - only for margins

            is_cut = False
            with log_failure(f"{path} is removed, and the report lacks its margins"):
                cut_margins(path, keep_through)
                is_cut = True
            if not is_cut:
                fs.unlink(path)
        # The run's name is its model, method and data; sweeps and rounds give their own names.
        number = inherited(ROUND_TAG)
        data = f"round {number}" if number else data_of(run)
        name = run_name(run.begins_as.path, inherited(TRIAL_TAG) or run.objective.name, data)
        tracked = open_training_run(
            run.config.tracking,
            folder,
            name=name,
            tags=_tags(run),
            keep_through=keep_through,
            is_evaluated=state is not None and state.evaluated,
        )
        tracked.callbacks = run.callbacks
    else:
        progress = Progress()
    status: Status = "FAILED"
    records = run.records = RunRecords(run, tracked, progress)
    try:
        yield records
        status = "FINISHED" if records.is_finished else "KILLED"
    except (Interrupted, KeyboardInterrupt):
        status = "KILLED"
        raise
    except Exception as error:
        if not records.is_finished:
            # Unexpected errors get a traceback in the log.
            known = isinstance(error, AlignError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            with log_failure("The status of the run is not recorded"):
                records.ended("failed", records.step, reason=reason)
            records.report()
        raise
    finally:
        progress.end()
        records.close()
        with log_failure("The status of the run is not recorded"):
            tracked.finish(status)


class RunRecords:
    """The records of one rank: metrics, trackers, tables, the terminal, checkpoints."""

    def __init__(self, run: Run, tracked: TrackedRun, progress: Progress) -> None:
        self._run = run
        self._tracked = tracked
        self._progress = progress
        self._is_watched = run.config.tracking.system_metrics and run.world.rank == 0
        self._machine_load()  # the next call measures the load since this one
        self._margins: Lines | None = None  # of this rank's rows
        self._has_lost_margins = False
        self._decode: Decode | None = None
        self._seeks_best = bool(run.config.train.best)
        self._last_line = 0.0
        state = run.checkpoint.state if run.checkpoint else None
        self._saved = (state.step, state.evaluated) if state else None
        self._failed_at: int | None = None
        self._failures = 0
        self.step = state.step if state else 0  # the last recorded step
        self.is_finished = False

    def origins(self) -> dict[str, str]:
        """The trackers' ids of the run, and the tag for finding it."""
        return self._tracked.origins()

    def log(self, line: str) -> None:
        """Prints a line."""
        self._progress.log(line)

    def begin(self, state: State) -> None:
        """Checks the disk space, records the settings, and starts the progress bar."""
        run = self._run
        run_on_rank_zero(run.world, lambda: require_disk_space(run))
        if run.world.rank == 0:
            self._describe()
        if state.step:
            self.log(f"resuming after step {state.step:,}")
        left = max(run.total_steps - state.step, 0)
        self._progress.begin("training", total=left, unit="steps")

    def agreed(self, gap: float, *, is_packed: bool) -> None:
        """Records the largest difference between the policy's log-probs and the cached ones."""
        found = (
            "the policy in 4 bits is close to the reference, but not equal to it"
            if is_packed
            else "checked: the policy reproduces the cached log-probs"
        )
        self.log(f"{found} (largest difference {gap:.1e} nats per completion)")
        self._tracked.log_params({"gate.largest_gap": f"{gap:.3e}"})

    def stepped(
        self, state: State, metrics: dict[str, float], line: dict[str, float] | None
    ) -> None:
        """Records an optimizer step; `line` is the metrics line of several, if one is due."""
        self._tracked.begin_sending()
        self._require_best(state, metrics)
        if line is not None:
            self._tracked.log_metrics({**line, **self._machine_load()}, step=state.step)
        padded = metrics["tokens"] / (1 - metrics["padding"])
        padding = round(padded - metrics["tokens"])
        self._progress.advance(1, tokens=round(padded), padding=padding)
        if time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            self.log(f"step {state.step:,}: {shown(metrics)}")

    def evaluated(
        self, state: State, metrics: dict[str, float], samples: Sequence[EvalSample]
    ) -> None:
        """Records an evaluation on all held-out sets."""
        self._require_best(state, metrics)
        self._tracked.log_metrics(metrics, step=state.step)
        if samples and self._run.world.rank == 0:
            with log_failure("No table of held-out completions"):
                self._write_table(state.step, samples)
        for name in self._run.feed.held_out_sources:
            prefix, of_set = prefix_of(name), f" of {name}" if name else ""
            plain = {one.removeprefix(prefix): value for one, value in metrics.items()}
            self.log(f"step {state.step:,}, held-out rows{of_set}: {shown(plain)}")

    def _write_table(self, step: int, samples: Sequence[EvalSample]) -> None:
        run, path = self._run, self._run.folder.evaluation(step)
        from ...stages.data.tokenizer import decoder  # noqa: PLC0415 - only for a table
        from ...stages.report.eval_table import evaluation_csv  # noqa: PLC0415 - as above

        if run.config.train.eval_text and not self._decode:
            stops = StopTokens.of(run.manifest.fingerprint).tokens
            self._decode = decoder(run.begins_as.path, stops)
        fs.make_folder(path.parent)
        text = evaluation_csv(samples, table_kind(run), decode=self._decode)
        fs.publish(path, text.encode())
        self._tracked.log_artifact(path)

    def ran_out(self, step: int, tokens: int) -> None:
        """Records that memory ran out in the step after this one, or in an evaluation."""
        self.log(
            f"step {step + 1:,}: memory ran out; later batches have at most {tokens:,} tokens, "
            "with the same result"
        )

    def not_applied(self, step: int, row_ids: tuple[str, ...]) -> None:
        """Records a step of NaN or infinity, with the ids of this rank's rows in it."""
        line = {"step": step, "rank": self._run.world.rank, "row_ids": row_ids}
        with closing(Lines(self._run.folder.nonfinite)) as lines:
            lines.append(json.dumps(line).encode())
        self.log(f"step {step:,} gave NaN or infinity and was not applied")

    def log_margins(self, step: int, epoch: int, rows: RowMargins) -> None:
        """Records the margins of this rank's rows."""
        from ...stages.report.row_margins import margins_line  # noqa: PLC0415 - only for margins

        if rows.row_ids:
            self._on_margins(lambda file: file.append(margins_line(rows, epoch=epoch, step=step)))

    def _on_margins(self, work: Callable[[Lines], None]) -> None:
        """Calls `work` with the file of margins; after a failure no more margins are written."""
        if self._has_lost_margins:
            return
        self._has_lost_margins = True  # reset on success
        with log_failure("Margins of training rows are not written from now on"):
            if not self._margins:
                folder = self._run.folder.row_parts
                fs.make_folder(folder)
                self._margins = Lines(folder / f"{self._run.world.rank}.jsonl")
            work(self._margins)
            self._has_lost_margins = False

    def close(self) -> None:
        """Closes the file of margins, if there is one."""
        if self._margins:
            with log_failure("The last margins of training rows may be missing"):
                self._margins.close()

    def save(self, state: State) -> None:
        """Saves a checkpoint unless it exists; the third failure in a row ends the run."""
        run = self._run
        if self._saved == (state.step, state.evaluated):
            return
        self._tracked.sync()  # a checkpoint must not have more steps than metrics.jsonl
        if self._saved and self._saved[0] == state.step:
            add_evaluation(run, state)
            self._saved = (state.step, state.evaluated)
            return
        if self._margins:
            self._on_margins(Lines.sync)
        failure = save_state(run, state)
        if not failure:
            self._failures, self._saved = 0, (state.step, state.evaluated)
            return
        if state.step != self._failed_at:
            self._failures, self._failed_at = self._failures + 1, state.step
        self._tracked.log_metrics({"checkpoint_failed": 1.0}, step=state.step)
        self.log(f"step {state.step:,}: the checkpoint was not saved: {failure}")
        if self._failures >= MOST_FAILURES:
            raise StorageError(
                f"{self._failures} checkpoints in a row could not be saved. Last error: {failure}"
            )

    def ended(
        self, how: RunStatus, step: int, *, reason: str = "", model_step: int | None = None
    ) -> None:
        """Records the final status and the model; a run without this record was killed."""
        run, folder, tracked = self._run, self._run.folder, self._tracked
        self.is_finished = how == "finished"
        if run.world.rank:
            return
        if self.is_finished:
            uploads = run.config.tracking.upload_model
            for path in (folder.metrics, folder.config, folder.engine):
                tracked.log_artifact(path)
            tracked.log_artifact(folder.model if uploads else folder.model / "README.md")
            if uploads and folder.merged.exists():
                tracked.log_artifact(folder.merged)
            of_step = step if model_step is None else model_step
            tags = {"align.cache_root": run.manifest.root, "align.step": str(of_step)}
            tracked.log_model_link(folder.model, tags=tags)
        tracked.sync()
        ending = RunEnding(
            ending=how,
            step=step,
            total_steps=run.total_steps,
            identity=identity_of(run),
            changes=run.changes,
            reason=redacted(reason),
            model_step=model_step,
        )
        ENDINGS.replace(folder.ending, ending)

    def report(self) -> dict[str, str]:
        """Writes the report, if there are metrics; records and returns its warnings."""
        warnings = dict[str, str]()
        folder = self._run.folder
        if self._run.world.rank == 0 and folder.metrics.stat().st_size:
            with log_failure("No report"):
                from .run_report import write_report  # noqa: PLC0415 - charts and templates

                warnings = write_report(folder.root)
                self._tracked.log_artifact(folder.report)
                record_warnings(self._tracked, warnings)
        return warnings

    def _require_best(self, state: State, metrics: Mapping[str, float]) -> None:
        """Checks once whether the metric of train.best is measured."""
        self.step = state.step
        if not self._seeks_best:
            return
        warning = why_unmeasured(self._run.config.train, metrics)
        if warning is not None:
            self._seeks_best = False
            if warning and self._run.world.rank == 0:
                logger.warning("%s", warning)

    def _machine_load(self) -> dict[str, float]:
        """The load of the machine, if tracking.system_metrics is set."""
        if not self._is_watched:
            return {}
        from ...stages.train.system_metrics import system_metrics  # noqa: PLC0415 - only if asked

        return system_metrics(self._run.folder.root)

    def _describe(self) -> None:
        """Records a description of the run, its location, and the given settings."""
        run, source, manifest = self._run, self._run.source, self._run.manifest
        options = {f"method.{name}": value for name, value in run.objective.values.items()}
        counts = {"rows.train": source.train_rows, "rows.eval": source.eval_rows, **source.counts}
        every = {**used_settings(run, "train", "model"), **options, **counts}
        params = {name: str(value) for name, value in every.items()}
        self._tracked.log_params(params)

        held_out = f", {source.eval_rows:,} held out" if source.eval_rows else ""
        sentence = (
            f"{quoted(model_name(run.begins_as.path))} trained by {quoted(run.objective.name)} on "
            f"{counted(source.train_rows, 'rows')} of {quoted(data_of(run))}{held_out}."
        )
        output = run.config.train.output
        places = {
            "run": output if is_remote(output) else str(run.folder.root.absolute()),
            "cache": origin_of(str(run.cache.root.resolve())),
            "policy": origin_of(run.begins_as.path),
            "reference": manifest.model,
        }
        given = [name for section in ("train", "lora") for name in run.settings.given(section)]
        names = {name: params[name] for name in (*options, *ALWAYS, *given) if name in params}
        chosen = {name: value for name, value in names.items() if name not in PLACES}
        self._tracked.describe(description(sentence, {**places, **chosen}))

        self._tracked.log_files(manifest.inputs)
        caches = {"training": (run.cache, manifest)}
        caches |= {f"evaluation {name}".strip(): one for name, one in run.held_out.items()}
        for context, (cache, made) in caches.items():
            root = cache.root.resolve()
            source_of = origin_of(str(root))
            self._tracked.log_dataset(
                root.name, digest=made.root, source=source_of, context=context
            )
        self._tracked.log_artifact(run.cache.manifest_file)


def table_kind(run: Run) -> Kind:
    """The kind of a table of held-out completions."""
    if run.objective.head == "score":
        return "scores"
    has_none = run.read_spec.context or not run.manifest.is_scored
    return "log-probs" if has_none else "log-ratios"


def shown(metrics: Mapping[str, float]) -> str:
    """The main metrics as one line."""
    known = {name: metrics[name] for name in SHOWN if math.isfinite(metrics.get(name, math.nan))}
    return ", ".join(f"{name} {value:.4g}" for name, value in known.items())


def record_warnings(tracked: TrackedRun, warnings: Mapping[str, str]) -> None:
    """Records the warnings as a tag, which is shown beside the run and can be searched."""
    text = "; ".join(f"{name}: {warning}" for name, warning in warnings.items())
    tracked.set_tags({WARNINGS_TAG: text or "nothing"})


def data_of(run: Run) -> str:
    """A name for the data of the cache."""
    return data_name([entry.name for entry in run.manifest.inputs])


def _tags(run: Run) -> dict[str, str]:
    changed = {"align.changed": "; ".join(run.changes)} if run.changes else {}
    return {
        **changed,
        NUMBERS_TAG: numbers_of(run),
        "align.stage": "train",
        "align.method": run.objective.name,
        "align.cache_root": run.manifest.root,
        "align.cache": origin_of(str(run.cache.root.resolve())),
        "align.reference_weights": run.manifest.fingerprint["model.weights"],
        "align.policy": origin_of(run.begins_as.path),
        "align.world_size": str(run.world.size),
    }


def used_settings(run: Run, *sections: str) -> dict[str, str]:
    """The settings of these sections as this run uses them, by their dotted names."""
    chosen = {*sections} | ({"lora"} if run.config.lora.enabled else set())
    found = {
        "model.path": origin_of(run.begins_as.path),
        "model.adapter": origin_of(run.begins_as.adapter),
        "model.device": run.policy.device.type,
        "train.cache": origin_of(str(run.cache.root)),
        "train.model": origin_of(run.begins_as.path),
        "train.tokens_per_batch": run.feed.settings.tokens_per_batch,
        "train.dtype": run.policy.dtype,
    }
    # train.resume does not affect the training.
    asked = {name: value for name, value in flatten(run.config).items() if name != "train.resume"}
    return {
        name: str(value)
        for name, value in without_secrets({**asked, **found}).items()
        if name.partition(".")[0] in chosen
    }
