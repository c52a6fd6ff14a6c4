"""How often a run's warnings are found where they were planted, and how often by mistake.

`python tests/bench/run_warnings.py --first 1000` draws twenty seeds for each warning and sixty
clean ones. Histories are made up (support/planted_runs.py): their noise is that of trainings.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from align.stages.report.run_warnings import WARNINGS, find_warnings
from support.planted_runs import PLANTED, clean

PLANTINGS, CLEAN = 20, 60


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    first = parser.parse_args().first
    for name in WARNINGS:
        runs = [PLANTED[name](clean(first + seed)) for seed in range(PLANTINGS)]
        found = sum(name in find_warnings(run) for run in runs)
        print(f"{name:14} found in {found} of {PLANTINGS} where it was planted")
    false = [find_warnings(clean(first + PLANTINGS + seed)) for seed in range(CLEAN)]
    alarms = [name for one in false for name in one]
    print(
        f"{sum(map(bool, false))} of {CLEAN} clean runs warn: {', '.join(alarms) or 'of nothing'}"
    )


if __name__ == "__main__":
    main()
