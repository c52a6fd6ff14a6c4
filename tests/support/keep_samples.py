"""A process that samples from a server and keeps each group before it asks for the next.

`python -m support.keep_samples FOLDER PROMPTS N OPTIONS`: the options of the server as JSON; each
answer that is kept is a line of its own, of the form `[prompt, number, text]`.
"""

import json
import os
import sys
from pathlib import Path

from align.schemas.round_options import ServerOptions
from align.schemas.samples import Prompt, Sampling
from align.stages.server import server_client
from align.stages.server.server_sampler import ServerSampler
from support.asking import still_wanted, wanted_of


def kept_in(folder):
    """The texts that were kept, by prompt and number."""
    path = folder / "kept.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {(prompt, number): text for prompt, number, text in whole}


def keep(folder, prompts, n, options):
    """Asks for what is missing, until all is there."""
    wanted = still_wanted(
        wanted_of([Prompt(f"text {i}") for i in range(prompts)], n), kept_in(folder)
    )
    sampler = ServerSampler(ServerOptions(**options))
    with (folder / "kept.jsonl").open("a") as file:
        for group in sampler.open(Sampling()).sample(wanted):
            file.writelines(json.dumps([s.prompt, s.number, s.text]) + "\n" for s in group)
            file.flush()
            os.fsync(file.fileno())


if __name__ == "__main__":
    server_client.FIRST_PAUSE = 0.002
    keep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
