"""How long tests wait for what is to happen."""

PATIENCE = 1000  # seconds, of what hangs alone: a machine that does much else beside it is slow
