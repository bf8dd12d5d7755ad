"""Tests of the device of a rank."""

from __future__ import annotations

import pytest
import torch

from actors.trainer.process_group import rank_device


def test_the_device_of_a_cuda_rank_has_an_index() -> None:
    # torch.cuda.set_device refuses a device without an index.
    alone = [rank_device("cuda", rank=rank, num_visible=1) for rank in range(3)]
    assert alone == [torch.device("cuda:0")] * 3
    shared = [rank_device("cuda", rank=rank, num_visible=2) for rank in range(3)]
    assert [device.index for device in shared] == [0, 1, 0]


def test_a_cuda_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rank 1 sees no GPU, expected one for device cuda"):
        rank_device("cuda", rank=1, num_visible=0)


def test_a_rank_on_the_cpu_needs_no_gpu() -> None:
    assert rank_device("cpu", rank=1, num_visible=0) == torch.device("cpu")
