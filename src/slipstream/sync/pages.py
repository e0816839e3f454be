"""Memory of the host that a GPU copies from and to by itself."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

FOR_ALL_GPUS = 1  # CU_MEMHOSTREGISTER_PORTABLE


class PageLock:
    """Keeps memory in its place until it is `release`d, which has to be before the memory goes.

    Copies between it and a GPU are then several times faster. Where there is no GPU, or the system refuses, nothing is
    locked, and copies are as they were. CUDA's driver is asked and not its runtime, which would tell of a refusal once
    more at whatever is done next.
    """

    def __init__(self, memory: Tensor) -> None:
        driver = _driver() if torch.cuda.is_available() else None
        refused = driver.cuMemHostRegister_v2(memory.data_ptr(), memory.nbytes, FOR_ALL_GPUS) if driver else 1
        self._driver, self._locked = driver, memory if refused == 0 else None

    def release(self) -> None:
        if self._driver and self._locked is not None:
            self._driver.cuMemHostUnregister(self._locked.data_ptr())
        self._locked = None


@cache
def _driver() -> Any:
    """CUDA's driver, or None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    return driver
