"""Random numbers as a function of a counter: the same in every layout, on every device, each time.

The SplitMix64 finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) of 64-bit counters, in wrapping int64 arithmetic, hence bit-identical everywhere.
"""

from __future__ import annotations

from torch import Tensor

# Multipliers of SplitMix64, as signed 64-bit integers. Counters that count are multiplied by STEP.
STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def symmetric_uniform(counter: Tensor) -> Tensor:
    """Hash int64 counters of any shape, in place, to float32 on (-1, 1): (2n+1) * 2**-24."""
    # Shifts of int64 copy the sign; the masks make them logical, as the mix needs.
    counter.bitwise_xor_((counter >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    counter.bitwise_xor_((counter >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    # The last xor-shift (by 31) changes only the lower 33 bits, of which none is used.
    return counter.bitwise_right_shift_(40).float().mul_(2.0**-23).add_(2.0**-24)
