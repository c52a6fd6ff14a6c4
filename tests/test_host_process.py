"""Who imports align and calls it finds his process as it was: only the command sets what is his."""

import subprocess
import sys

from support.patience import PATIENCE

SCRIPT = """
import csv, gc, io, json, logging, os, signal, sys, warnings
warnings.simplefilter("ignore")
import deepspeed, mlflow, pyarrow, torch, transformers  # what they set is theirs
import peft, sympy.utilities.exceptions, torch._dynamo, torch.optim.lr_scheduler
import mlflow.store.tracking.sqlalchemy_store, mlflow.tracking.context.registry
transformers.utils.logging.get_verbosity()
warnings.resetwarnings()
warnings.simplefilter("ignore")
logging.getLogger("mlflow").setLevel(logging.NOTSET)

def state():
    names = [None, "align", "mlflow", "alembic", "urllib3", "transformers", "torch", "DeepSpeed"]
    loggers = [logging.getLogger(name) for name in names]
    return {
        "filters": [str(one) for one in warnings.filters],
        "csv": csv.field_size_limit(),
        "logging": [(one.name, one.level, one.propagate, len(one.handlers)) for one in loggers],
        "last resort": str(logging.lastResort.formatter),
        "signals": {str(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().sum().item(),
        "hooks": [str(sys.excepthook), str(sys.stdout), str(sys.stderr)],
        "collector": (gc.isenabled(), gc.get_threshold()),
        "umask": os.umask(0o022),
    }

os.umask(0o022)
before = state()
data, model, home = sys.argv[1:]

def compare(after_what):
    now = state()
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed, (after_what, changed)

import align, align.cli, align.stages.engine.distributed, align.stages.engine.deepspeed_state
import align.pipeline.train, align.pipeline.sweep, align.pipeline.verify
compare("import")

from align.pipeline.mlflow_sync import sync_run
from align.schemas.config import TrackingOptions
from pathlib import Path

store = {"tracking.uri": f"sqlite:///{home}/mlflow.db"}
align.precompute(data, model=model, output=f"{home}/cache", settings=store)
compare("stage 1")
few = {"train.max_steps": 1, "train.eval_fraction": 0.2, "train.lr": 0.001}
align.train("dpo", cache=f"{home}/cache", output=f"{home}/run", settings=store | few)
compare("stage 2")
align.load_cache(f"{home}/cache", text=True).collect()
compare("load_cache")
sync_run(Path(home) / "run", TrackingOptions(uri=store["tracking.uri"]))
compare("mlflow-sync")
"""


def test_the_library_leaves_its_host_as_it_was(world, tmp_path):
    rows = world.data.paired_csv.read_text().splitlines(keepends=True)
    (tmp_path / "few.csv").write_text("".join(rows[:40]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "few.csv", world.model, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
