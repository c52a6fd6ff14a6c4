"""How long `align --help` takes: what a person waits for before any command does anything."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 9


def main() -> None:
    seconds = [timed("-m", "align", "--help") for _ in range(ROUNDS)]
    bare = [timed("-c", "") for _ in range(ROUNDS)]
    print(f"align --help {statistics.median(seconds):.2f} s", end=", ")
    print(f"of which Python alone {statistics.median(bare):.2f} s")


def timed(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
