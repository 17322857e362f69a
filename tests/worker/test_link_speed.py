"""Measuring the link needs a GPU; elsewhere there is none."""

from __future__ import annotations

import torch

from freetoken.worker.link_speed import measure_link


def test_a_cpu_has_no_link():
    assert measure_link(torch.device("cpu")) is None
