"""Small arrays to the device without waiting for what it is computing."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` as a tensor on `device`, in the order of its current stream.

    On the CPU it shares memory with `array`. A plain copy to a GPU would wait until the stream is
    empty; from pinned memory, which torch keeps until the copy is done, it does not.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` in host memory, to be read when an event recorded after this has fired."""
    return tensor.to("cpu", non_blocking=True)
