"""What a cache in fewer bits would take, by the formulas of the survey "KV Cache 技术演进"."""

from kvjax.errors import check_integer


def quantized_bytes_per_element(bits: int, group: int, metadata_bytes: float) -> float:
    """Mean bytes of an element stored in groups: bits / 8 + metadata_bytes / group (section 5).

    Args:
      bits: bits of one element.
      group: elements that share one scale and zero point.
      metadata_bytes: bytes of a group's scale and zero point together.

    KIVI at 2 bits, 32 elements a group, 4 bytes of scale and zero point, against bfloat16:

    >>> quantized_bytes_per_element(2, 32, 4)
    0.375
    >>> round(2 / quantized_bytes_per_element(2, 32, 4), 2)
    5.33
    """
    check_integer("bits", bits, 1)
    check_integer("group", group, 1)
    if not metadata_bytes >= 0:
        raise ValueError(f"metadata_bytes is {metadata_bytes!r}: must be 0 or more")
    return bits / 8 + metadata_bytes / group


def residual_ratio(
    tokens: int, residual: int, quantized_bytes: float, bytes_per_element: float
) -> float:
    """Size of a cache that keeps its newest tokens exact, relative to an exact one (section 10.2).

    Args:
      tokens: cached tokens.
      residual: newest tokens that stay in full precision.
      quantized_bytes: mean bytes of an element of the older tokens, metadata included.
      bytes_per_element: bytes of an element in full precision.

    A residual of 128 at 8192 tokens, KIVI's 0.375 bytes against bfloat16's 2:

    >>> f"{residual_ratio(8192, 128, 0.375, 2):.1%}"
    '20.0%'
    """
    check_integer("tokens", tokens, 1)
    check_integer("residual", residual, 0)
    if residual > tokens:
        raise ValueError(f"residual is {residual}: must be 0 to tokens, which is {tokens}")
    for name, value in (
        ("quantized_bytes", quantized_bytes),
        ("bytes_per_element", bytes_per_element),
    ):
        if not value > 0:
            raise ValueError(f"{name} is {value!r}: must be above 0")
    older = (tokens - residual) * quantized_bytes
    return (older + residual * bytes_per_element) / (tokens * bytes_per_element)
