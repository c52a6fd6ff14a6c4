"""What `make test-kernels` sets reaches torch, in this process and in those of a test."""

import math
import os

import pytest

from support.kernel_facts import facts
from support.programs import run_ranks

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def said_by_rank(tmp_path_factory):
    """A rank of its own, whose libraries say how they compute."""
    verbose = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    return run_ranks("kernel_facts", tmp_path_factory.mktemp("rank"), ranks=1, **verbose)


def test_every_process_computes_with_the_kernels_and_threads_that_are_set(said_by_rank):
    wanted = os.environ.get("ATEN_CPU_CAPABILITY")
    threads = int(os.environ.get("ALIGN_TEST_THREADS") or 1)
    for found in (facts(), said_by_rank.first):
        assert found["threads"] == threads
        assert wanted in {None, found["capability"].lower()}


def test_the_libraries_of_products_compute_as_they_are_told(said_by_rank):
    isa, branch = os.environ.get("ONEDNN_MAX_CPU_ISA"), os.environ.get("MKL_CBWR", "OFF")
    said = [
        line.partition("isa:")[2]
        for line in said_by_rank.out.splitlines()
        if "info,cpu,isa" in line
    ]
    assert len(said) == 1
    assert isa is None or plain(said[0]).endswith(plain(isa))
    products = [line for line in said_by_rank.out.splitlines() if " SGEMM(" in line]
    assert products
    assert all(f"CNR:{branch}" in line for line in products)


def test_log_probs_are_off_by_the_noise_that_is_set_and_by_nothing_else(said_by_rank):
    noise = float(os.environ.get("ALIGN_TEST_NOISE") or 0)
    exact = -math.log(1 + math.exp(0))
    for found in (facts(), said_by_rank.first):
        off = max(abs(logp / exact - 1) / 2**-23 for logp in found["logps"])
        assert noise / 2 <= off <= noise + 1


def plain(isa):
    """`Intel AVX2` or `SSE41`, as both spell it."""
    return isa.upper().replace("INTEL", "").replace(" ", "").replace(".", "")
