"""Files as a disk may give them back: with one bit that is another."""

import os
import random

from align.schemas.errors import CorruptionError

SEED = int(os.environ.get("ALIGN_TEST_SEED", "20"))


def flips(sizes, count):
    """So many places, each a name of `sizes`, a byte and a bit of it; no place comes twice."""
    draw = random.Random(SEED)
    print(f"ALIGN_TEST_SEED={SEED}")
    names = sorted(name for name, size in sizes.items() if size)
    weights = [sizes[name] ** 0.5 for name in names]  # or one large file would get them all
    seen = set()
    for _ in range(min(count, 4 * sum(sizes.values()))):
        while True:
            (name,) = draw.choices(names, weights)
            place = (name, draw.randrange(sizes[name]), draw.randrange(8))
            if place not in seen:
                break
        seen.add(place)
        yield place


def flipped(content, count):
    """The bytes once for each of so many flips."""
    for _, byte, bit in flips({"": len(content)}, count):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << bit
        yield bytes(damaged)


def noticed(read, places):
    """How many flips are refused by the file's name; the others change nothing that is read."""
    whole, found = read(), 0
    for file, byte, bit in places:
        good = file.read_bytes()
        damaged = bytearray(good)
        damaged[byte] ^= 1 << bit
        file.write_bytes(damaged)
        try:
            assert read() == whole
        except CorruptionError as error:
            assert f"/{file.name} is damaged: " in str(error)  # noqa: PT017
            found += 1
        file.write_bytes(good)
    return found
