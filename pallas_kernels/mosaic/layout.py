"""How a pool must lie in a TPU's memory for the kernel to read it in place."""

from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding


def pool_format(sharding: Sharding, axes: int = 4) -> Format:
    """Describe a [N, Hkv, P, D] pool whose pages are contiguous, as the kernel's copies need them.

    Left to itself, XLA puts pages last for head_dim below 128 (it saves the padding to 128 lanes),
    and a program that hands such a pool to the kernel begins and ends with a copy of all of it.
    Create pools with this format (`jax.jit(init, out_shardings=...)` or `jax.device_put`), and let
    programs that return them keep it; the price is 128 / head_dim times the bytes. From head_dim
    128 on it is what XLA chooses anyway.

    Args:
        sharding: where the pool lives.
        axes: of the pool; 3 for representatives, [N, Hkv, D].

    Returns:
        The format, to be used wherever JAX takes a sharding.
    """
    return Format(Layout(major_to_minor=tuple(range(axes))), sharding)
