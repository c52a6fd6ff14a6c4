import subprocess
import sys

from support.patience import PATIENCE

CODE = """
import sys
from transformers import utils
asked = utils.is_scipy_available
import align.pipeline.train
import align.stages.model.reference
assert "transformers.modeling_utils" in sys.modules
print("scipy" in sys.modules, utils.is_scipy_available is asked)
import scipy.optimize
"""


def test_modelling_code_is_loaded_without_scipy_which_others_may_load_afterwards():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["False", "True"]
