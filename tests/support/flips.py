"""Files with one flipped bit."""

import random


def flipped(content, count=60):
    """The bytes with one flipped bit, for each of `count` drawn bits."""
    bits = range(8 * len(content))
    for bit in random.Random(0).sample(bits, min(count, len(bits))):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def flip_bits(path, count=60):
    """Damages a file `count` times and restores it at the end."""
    good = path.read_bytes()
    for damaged in flipped(good, count):
        path.write_bytes(damaged)
        yield
    path.write_bytes(good)
