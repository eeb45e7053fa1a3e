import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Products must not change with the machine, and the tests share two cores with others."""
    torch.set_num_threads(1)
