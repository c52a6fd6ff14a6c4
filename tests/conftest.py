import gc
import itertools
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from align.cli import SHORT_SPINS
from align.schemas import safe_text
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.mlflow_silence import ENVIRONMENT
from support.command import Answer
from support.garbage import freeze_modules
from support.trainings import Course, Server, fork_server
from support.worlds import World, make_shallow_world

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores, and every process of a test wants both
os.environ |= SHORT_SPINS  # stage 1 computes with the threads of its plan
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("ALIGN_MODEL", None)
platform.platform()  # asks `uname` once, for whichever test a library would ask it in

HOMES = pytest.StashKey()
OF_ONE_LAUNCH = ("tests/distributed/train",)
# The first file does without the fork server, which a file of another worker begins meanwhile.
LONG = ("tests/commands/test_ray.py", "tests/distributed", "tests/commands", "tests/unit/tracking")
# No example is timed: the machine may be busy.
NOT_ASKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("align", deadline=None, suppress_health_check=NOT_ASKED)
settings.load_profile("align")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # As under nohup. A process that a test starts would inherit this; it inherits no handler.
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so is a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ByLaunch(LoadFileScheduling):
    """A worker gets a file, or all files that read what one launch of ranks wrote down."""

    def _split_scope(self, nodeid):
        folder = nodeid.rpartition("::")[0].rpartition("/")[0]
        return folder if folder in OF_ONE_LAUNCH else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # else the files with most tests come first
    return ByLaunch(config, log)


def pytest_collection_modifyitems(items):
    """Long files come first, so that workers end together."""

    def place(item):
        found = (at for at, folder in enumerate(LONG) if item.nodeid.startswith(folder))
        return next(found, len(LONG))

    items.sort(key=place)


def pytest_configure(config):
    """Homes are numbered here: a fixture would cost every case some time."""
    homes = tempfile.mkdtemp(prefix="align-homes-")
    config.add_cleanup(lambda: shutil.rmtree(homes))
    config.stash[HOMES] = (f"{homes}/{number}" for number in itertools.count())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """No test finds the caches or the secrets of another, nor its linear layers."""
    os.environ["ALIGN_HOME"] = next(item.config.stash[HOMES])  # made when it is used
    safe_text._secrets.clear()
    freeze_modules()
    if zero3 := sys.modules.get("deepspeed.runtime.zero.partition_parameters"):
        # DeepSpeed replaces torch's own for the whole process, with the first layer that it shards.
        sharding = zero3.InsertPostInitMethodToModuleSubClasses
        functional = sys.modules["torch.nn.functional"]
        functional.linear = getattr(sharding, "linear_bk", functional.linear)


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda", help="of tests marked gpu; cpu tries them out")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing is garbage meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze_modules()


@pytest.fixture(scope="session", autouse=True)
def clean_root():
    """No test records anything in the project's own folder."""
    root, kept = Path(__file__).parents[1], {"mlruns", "mlflow.db"}
    before = {path.name for path in root.iterdir()}
    yield
    assert not kept & {path.name for path in root.iterdir()} - before


@pytest.fixture(scope="session")
def device(request):
    """The device of `--device`: a GPU, unless the tests themselves are tried out."""
    # It imports torch, which reads OMP_NUM_THREADS then.
    import torch  # noqa: PLC0415

    name = request.config.getoption("device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.fail("torch finds no GPU that it can use here, and these tests are for one")
    return name


@pytest.fixture(scope="session")
def several(device):
    """The number of ranks: one for each GPU, over NCCL; on a CPU four, over gloo."""
    # It imports torch, as above.
    import torch  # noqa: PLC0415

    count = torch.cuda.device_count() if device == "cuda" else 4
    if count < 2:
        pytest.skip("one GPU is here, and this is a test of several")
    return count


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_mlflow_settings(here, monkeypatch):
    """No variable of the environment configures MLflow, and those set meanwhile are removed."""
    for name in (*ENVIRONMENT, "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def new_store(shared):
    """Copies a store of MLflow without runs to a folder or path: to make one takes seconds."""
    # It takes seconds to import, which most tests do without.
    from support.mlflow_runs import make_empty_store  # noqa: PLC0415

    made = shared / "mlflow.db"
    made_once(made, make_empty_store)
    return lambda place: f"sqlite:///{shutil.copy(made, place)}"


@pytest.fixture(scope="module")
def uri(new_store, tmp_path_factory):
    """The address of a store of the module's own."""
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def prepared_run(tmp_path):
    """The prepared folder of a run, still empty."""
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    # It imports transformers, which the process that starts the workers does without.
    from align.stages.demo.tiny_tokenizer import make_tokenizer  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    make_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all workers, for what takes long to make and is only read."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def made_once(folder, make):
    """Has the first worker that asks make a folder."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder)


@pytest.fixture(scope="session")
def world(shared):
    """A tokenizer, an untrained model and sixty preferences."""
    folder = shared / "small-world"
    made_once(folder, lambda folder: make_shallow_world(folder, rows=60))
    return World(folder)


@pytest.fixture(scope="session")
def reward_model(world, tmp_path_factory):
    """A model with a random head, in a folder as transformers saves it."""
    # It imports torch, as above.
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    folder = tmp_path_factory.mktemp("reward") / "model"
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    config = AutoConfig.from_pretrained(world.model)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def journey(server, world, tmp_path_factory):
    """Stage 1 with an align.yaml beside the data and no flag."""
    folder = tmp_path_factory.mktemp("journey")
    shutil.copy(world.data.paired, folder / "data.parquet")
    lines = ["model:", f"  path: {world.model}", "cache:", "  shards: 8", "  output: cache"]
    (folder / "align.yaml").write_text("\n".join(lines))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    alone = {"ALIGN_HOME": str(elsewhere / "home"), "DISK_FAULTS": ""}
    answer = server.fork(("precompute-ref", folder / "data.parquet"), elsewhere, alone).answer()
    return Journey(folder, elsewhere, answer, folder / "cache")


class Journey(NamedTuple):
    """A first run: the folder of its data, where it was started, its answer and its cache."""

    folder: Path
    cwd: Path
    answer: Answer
    cache: Path


@pytest.fixture(scope="session")
def server(shared, tmp_path_factory):
    """Starts commands that need not import anything."""
    with fork_server(shared) as address:
        server = Server(tmp_path_factory.mktemp("server"), address)
        yield server
        server.close()


@pytest.fixture(scope="session")
def course(server, world, tmp_path_factory):
    """A reference whose config asks for dropout, and a cache of it to learn from."""
    course = Course(server, tmp_path_factory.mktemp("course"))
    course.prepare(world)
    return course


@pytest.fixture(scope="session")
def training_world(tokenizer_folder, shared):
    """A very small untrained model, and caches of its log-probs."""
    # As above.
    from support.training_world import TrainingWorld, make_training_world  # noqa: PLC0415

    folder = shared / "training-world"
    made_once(folder, lambda folder: make_training_world(folder, tokenizer_folder))
    return TrainingWorld(folder)


@pytest.fixture(scope="session")
def deepspeed():
    """It collects garbage several times as it opens an engine, so it is frozen first."""
    # It imports torch, which most of these tests do without.
    from align.stages.engine.deepspeed_compat import deepspeed  # noqa: PLC0415

    freeze_modules()
    return deepspeed


@pytest.fixture
def one_rank(deepspeed):
    """This process, as a world of one rank."""
    from align.stages.engine.distributed import joined_world  # noqa: PLC0415

    with joined_world() as world:
        yield world


@pytest.fixture(scope="session")
def object_server():
    """The address of an S3 server with one bucket."""
    # moto and boto3 take a second, and most tests do without.
    from support.object_server import s3_server  # noqa: PLC0415

    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(object_server, monkeypatch):
    """A location in the bucket that no other test uses; the environment names its server."""
    from support.object_server import BUCKET, forget, use  # noqa: PLC0415

    use(monkeypatch, object_server)
    yield f"s3://{BUCKET}/{secrets.token_hex(4)}"
    forget()
