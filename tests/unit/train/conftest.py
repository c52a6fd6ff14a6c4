import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def moved(training_world, tmp_path_factory):
    """A policy some nats away from the reference, to either side."""
    folder = tmp_path_factory.mktemp("moved")
    for path in training_world.model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    drawn = torch.Generator().manual_seed(5)
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=drawn)
        for name, weight in sorted(weights.items())
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
