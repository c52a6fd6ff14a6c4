"""Files as a disk may give them back: with one bit that is another."""

import random


def flipped(content, count=60):
    """The bytes once for each of so many bits."""
    bits = range(8 * len(content))
    for bit in random.Random(0).sample(bits, min(count, len(bits))):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def flip_bits(path, count=60):
    """Damages a file so many times; afterwards it is whole again."""
    good = path.read_bytes()
    for damaged in flipped(good, count):
        path.write_bytes(damaged)
        yield
    path.write_bytes(good)
