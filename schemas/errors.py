"""Every error a person can meet, and the exit code that goes with it.

AlignError (2)
├── UsageError (2)          a flag, a config key, a path, a model folder
├── BadDataError (3)        too many rows that cannot be used
├── FingerprintError (4)    the cache was made from something else
│   └── OlderFormatError    or by an older align
├── CorruptionError (5)     a file is not what the manifest says
├── NonFiniteError (6)      NaN or infinity where a number must be
├── PeerError (69)          another rank of this run is gone
├── StorageError (74)       the disk said no
│   └── PathError (2)       a path that cannot be used so: gone, forbidden, of another kind
└── LockedError (75)        another process is at work in this folder

Interrupted (129, 130, 138, 143)  a signal asked to stop; no AlignError, for nobody may mend it
"""


class AlignError(Exception):
    """Says what went wrong, where, and what to do about it."""

    exit_code = 2


class UsageError(AlignError):
    """The request cannot be carried out as written."""


class BadDataError(AlignError):
    """More rows are unusable than the user allows."""

    exit_code = 3


class FingerprintError(AlignError):
    """What the cache was made from differs from what is asked for now."""

    exit_code = 4


class OlderFormatError(FingerprintError):
    """The cache has a format that this align no longer reads."""


class CorruptionError(AlignError):
    """A stored file differs from what its manifest says."""

    exit_code = 5


class NonFiniteError(AlignError):
    """A computed number is NaN or infinite."""

    exit_code = 6


class PeerError(AlignError):
    """Another rank ended while this one needed it."""

    exit_code = 69


class StorageError(AlignError):
    """The disk refused an operation."""

    exit_code = 74


class PathError(StorageError):
    """A path cannot be used as it was meant, though nothing is wrong with the disk."""

    exit_code = 2


class LockedError(AlignError):
    """Another process holds the output folder."""

    exit_code = 75


class Interrupted(BaseException):
    """A signal asked the program to stop; it may arrive anywhere, so no handler may swallow it."""

    def __init__(self, signal_number: int, way_on: str = "Run the same command again") -> None:
        super().__init__(f"Stopped by signal {signal_number}. {way_on} to go on from here.")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
