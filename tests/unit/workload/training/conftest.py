"""A rank without others, for what is collective."""

import pytest
import torch.distributed as dist


@pytest.fixture
def only_rank(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
