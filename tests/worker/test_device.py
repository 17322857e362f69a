"""Which device computes, and what its memory leaves for slots."""

from __future__ import annotations

import logging

import pytest
import torch

from freetoken.errors import ConfigError
from freetoken.worker import device as subject
from freetoken.worker.budget import MIN_GPU_MARGIN_BYTES
from freetoken.worker.device import MemoryReading, check_prices, find_device, find_spare

GIB = 1 << 30


def test_the_cpu_is_taken_when_asked_for():
    assert find_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("obstacle", ["this torch is built without CUDA", "torch finds no GPU"])
def test_without_a_usable_gpu_auto_is_the_cpu_and_cuda_is_refused_with_the_reason(
    monkeypatch, obstacle
):
    monkeypatch.setattr(subject, "_obstacle", lambda: obstacle)
    assert find_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=rf"--device cuda: {obstacle}; use --device cpu or auto"):
        find_device("cuda")


@pytest.mark.parametrize(
    ("capability", "obstacle"), [((7, 5), "capability 7.5, the kernels need 8.0"), ((8, 0), None)]
)
def test_a_gpu_that_is_too_old_is_an_obstacle(monkeypatch, capability, obstacle):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = subject._obstacle()
    assert found is None if obstacle is None else obstacle in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_here_the_reason_is_named():
    with pytest.raises(ConfigError, match=r"without CUDA|finds no GPU"):
        find_device("cuda")


def test_spare_memory_leaves_the_peak_of_steps_what_comes_later_and_a_margin():
    now = MemoryReading(free=10 * GIB, reserved=9 * GIB, allocated=7 * GIB, peak=8 * GIB)
    # 10 free and 2 in the allocator's hands, of which steps took 1 beside what is there now.
    assert find_spare(now, 0, 0) == 11 * GIB - MIN_GPU_MARGIN_BYTES
    assert find_spare(now, 0, 3 * GIB) == 8 * GIB - MIN_GPU_MARGIN_BYTES
    assert find_spare(now, 100 * GIB, 0) == 9 * GIB
    assert find_spare(now, 0, 12 * GIB) == 0


@pytest.mark.parametrize(("peak", "level"), [(30, "INFO"), (31, "WARNING")])
def test_more_memory_than_is_priced_is_a_warning(caplog, monkeypatch, peak, level):
    monkeypatch.setattr(logging.getLogger("freetoken"), "propagate", True)
    with caplog.at_level(logging.INFO, "freetoken"):
        assert check_prices(peak, {"weights": 10, "kv": 20}) == (level == "INFO")
    assert [record.levelname for record in caplog.records] == [level]
