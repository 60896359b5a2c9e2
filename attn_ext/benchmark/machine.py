"""What this machine can do at best, measured in the same run as what is held against it."""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

import attn_ext
from attn_ext._library import LIBRARY_PATH

__all__ = ["Machine", "measure", "multiply_add_peak", "read_rate"]


@cache
def _library() -> ctypes.CDLL:
    """csrc/benchmark/peak.cpp, which is only loaded where somebody measures."""
    library = ctypes.CDLL(str(LIBRARY_PATH.with_name("libattn_ext_peak.so")))
    library.multiply_add_peak.argtypes = (ctypes.c_char_p, ctypes.c_bool, ctypes.c_int, ctypes.c_double)
    library.read_rate.argtypes = (ctypes.c_int, ctypes.c_double)
    library.multiply_add_peak.restype = library.read_rate.restype = ctypes.c_double
    return library


def multiply_add_peak(capability: str, bfloat16: bool, threads: int, seconds: float) -> float:
    """Flops a second of multiply-adds from registers, or with ``bfloat16`` of its dot products."""
    return float(_library().multiply_add_peak(capability.encode(), bfloat16, threads, seconds))


def read_rate(threads: int, seconds: float) -> float:
    """Bytes a second that the threads together read from memory."""
    return float(_library().read_rate(threads, seconds))


@dataclass
class Machine:
    """Limits of so many threads on one instruction set; the best that was seen."""

    threads: int
    capability: str
    float32_peak: float = 0.0  # flops a second of multiply-adds
    bfloat16_peak: float = 0.0  # of bfloat16 dot products, or float32_peak where there are none
    read_rate: float = 0.0  # bytes a second

    def look_again(self, seconds: float) -> None:
        """Measure once more: others may have been using the machine."""
        peak = multiply_add_peak
        self.float32_peak = max(self.float32_peak, peak(self.capability, False, self.threads, seconds))
        self.bfloat16_peak = max(self.bfloat16_peak, peak(self.capability, True, self.threads, seconds))
        self.read_rate = max(self.read_rate, read_rate(self.threads, seconds))

    def peak(self, dtype: torch.dtype) -> float:
        """Flops a second. float16 is computed in float32; float64 has half as many lanes as float32."""
        if dtype == torch.bfloat16:
            return self.bfloat16_peak
        return self.float32_peak / (2 if dtype == torch.float64 else 1)

    def memory_bound(self, flops: float, bytes_read: int, dtype: torch.dtype) -> bool:
        """Whether reading takes longer than computing, each at its best."""
        return bytes_read / self.read_rate > flops / self.peak(dtype)

    def shortest(self, flops: float, bytes_read: int, dtype: torch.dtype) -> float:
        """Seconds that nothing can be faster than."""
        return max(flops / self.peak(dtype), bytes_read / self.read_rate)


def measure(threads: int, seconds: float) -> Machine:
    """The machine as it is now, on the instruction set that attn_ext runs on."""
    machine = Machine(threads, attn_ext.cpu_capability())
    machine.look_again(seconds)
    return machine
