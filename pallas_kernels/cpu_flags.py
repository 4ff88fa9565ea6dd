"""What this machine's processor multiplies, where programs for a CPU differ by it."""

import contextlib
import functools

_BF16_FLAGS = {"amx_bf16", "avx512_bf16"}  # x86: bfloat16 products without going through float32


@functools.cache
def cpu_multiplies_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether this CPU says that it multiplies bfloat16; where it says nothing, it does not.

    Args:
      cpuinfo: what Linux says of it.
    """
    with contextlib.suppress(OSError), open(cpuinfo, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("flags"):
                return not _BF16_FLAGS.isdisjoint(line.split())
    return False
