"""Lets `python -m align` be the same program as `align`."""

from .cli import main

if __name__ == "__main__":
    main()
