import pytest

from align.stages.methods.table import METHODS as TABLE
from support.programs import run_ranks
from support.training_ranks import SHARED

METHODS = ("dpo", "kto", "orpo")
KINDS_OF_KTO = ("kto-some", "kto-all", "kto-classes")
ALONE = [
    *(f"{method}/{cut}/zero0" for method in METHODS for cut in ("whole", "thirds", "rows")),
    *(f"{method}/thirds/zero{stage}" for method in METHODS for stage in (1, 2, 3)),
    *(f"{kind}/whole/zero0" for kind in KINDS_OF_KTO),
    *(f"{kind}/rows/zero2" for kind in KINDS_OF_KTO),
    *(f"table-{name}/{cut}/zero0" for name in TABLE for cut in ("whole", "thirds")),
    "trouble",
]
SPREAD = [
    *SHARED,
    *(f"{method}/thirds/zero{stage}" for method in METHODS for stage in (0, 1, 2, 3)),
    *(f"{kind}/rows/zero0" for kind in KINDS_OF_KTO),
    *(f"table-{name}/rows/zero1" for name in TABLE),
    "trouble",
]


@pytest.fixture(scope="session")
def launch_training(tmp_path_factory, training_world):
    """Trains in so many processes; gives what each of them wrote down."""

    def launch(size, names):
        folder = tmp_path_factory.mktemp(f"training-{size}")
        caches = (training_world.pairs, training_world.labels, training_world.everything)
        program = ("training_ranks", folder, *caches, *names)
        return run_ranks(*program, ranks=size).ranks

    return launch


@pytest.fixture(scope="session")
def alone(launch_training):
    """What one process saw."""
    return launch_training(1, ALONE)


@pytest.fixture(scope="session")
def spread(launch_training):
    """What each of two processes saw."""
    return launch_training(2, SPREAD)
