import os

if os.environ.get("ALIGN_TEST_THREADS") or os.environ.get("ALIGN_TEST_NOISE"):
    from support import kernels  # noqa: F401 - before anything computes
