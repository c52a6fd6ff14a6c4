"""Counts what torch's compiler did: graphs that it made, and breaks in them."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters


@dataclass
class Compilations:
    """Graphs since the beginning, and the reasons of breaks."""

    graphs: int = 0
    breaks: tuple[str, ...] = ()

    def look(self):
        self.graphs = counters["stats"]["unique_graphs"]
        self.breaks = tuple(counters["graph_break"])
        return self


@contextmanager
def compilations():
    """Nothing is compiled when it begins, and what the block compiled is forgotten after it."""
    torch.compiler.reset()
    counters.clear()
    try:
        yield Compilations()
    finally:
        torch.compiler.reset()
        counters.clear()
