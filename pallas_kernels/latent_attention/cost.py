"""What attention over latents costs in its two forms, and which of them is cheaper."""

from typing import Literal, NamedTuple


class LatentDims(NamedTuple):
    """The widths of one MLA layer (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        latent: Dc, elements of the latent.
        rope: Dr, elements of the position key.
        nope: of a head's key, those that come from the latent.
        value: of a head's value.
    """

    latent: int
    rope: int
    nope: int
    value: int


class Cost(NamedTuple):
    """What one form computes and moves.

    Attributes:
        flops: multiplications and additions.
        bytes: to and from memory.
    """

    flops: int
    bytes: int

    def at(self, flops_per_byte: float) -> float:
        """Flops that pass while it runs, on a machine that does so many for each byte it moves."""
        return max(float(self.flops), self.bytes * flops_per_byte)


class LatentForms(NamedTuple):
    """Both forms, and the cheaper one.

    Attributes:
        absorbed: queries take W_UK in and attend to latents; W_UV is applied to what comes out.
        expanded: the latents become every head's keys and values first.
        cheaper: which of them takes less time; "absorbed" if they take the same.
    """

    absorbed: Cost
    expanded: Cost
    cheaper: Literal["absorbed", "expanded"]


def absorbed_or_expanded(
    queries: int,
    context: int,
    heads: int,
    dims: LatentDims,
    *,
    itemsize: int = 2,
    flops_per_byte: float = 240.0,
) -> LatentForms:
    """Count what attending the newest tokens of a sequence costs in both forms.

    With q queries, n cached tokens and p = q n - q (q - 1) / 2 pairs that causality leaves, a head

    - absorbed: takes W_UK in (2 q nope Dc), scores (2 p (Dc + Dr)), sums latents (2 p Dc) and
      applies W_UV (2 q Dc value). Moved, beside what both forms move: queries and outputs in latent
      space, written and read.
    - expanded: makes keys and values (2 n Dc (nope + value)), scores (2 p (nope + Dr)) and sums
      values (2 p value). Moved beside: keys and values, written and read.

    Both read the n tokens and both matrices once and the queries, and write the outputs. So few
    queries are cheaper absorbed and many expanded: of DeepSeek-V3's heads (nope and value 128, Dc
    512) a pair costs 768 multiplications more absorbed, a token's expansion 131,072, and from
    171 queries on in a long context the expansion pays. Time is that of the slower of computing
    and moving.

    Args:
        queries: q, the newest tokens of the sequence.
        context: n, cached tokens, the queries' own included.
        heads: query heads.
        dims: widths of the layer.
        itemsize: bytes of an element of everything.
        flops_per_byte: what the machine computes while it moves a byte; 240 is a TPU v5e in
            bfloat16 (197 TFLOP/s, 819 GB/s), and an H100 has 295.

    Returns:
        The `LatentForms`.

    Raises:
        ValueError: an argument is out of range; the message names it.

    >>> v3 = LatentDims(latent=512, rope=64, nope=128, value=128)
    >>> [absorbed_or_expanded(q, 131072, 128, v3).cheaper for q in (1, 170, 171)]
    ['absorbed', 'absorbed', 'expanded']
    """
    named = {"queries": queries, "context": context, "heads": heads, "itemsize": itemsize}
    named |= {f"dims.{name}": value for name, value in dims._asdict().items()}
    for name, value in named.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if queries > context:
        raise ValueError(
            f"queries is {queries} and context {context}; queries are a sequence's last cached "
            "tokens, so there cannot be more"
        )
    if not flops_per_byte > 0:
        raise ValueError(f"flops_per_byte is {flops_per_byte}; it must be above 0")
    latent, rope, nope, value = dims
    pairs = queries * context - queries * (queries - 1) // 2
    moved = context * (latent + rope) + heads * latent * (nope + value)
    moved += queries * heads * (nope + rope + value)
    absorbed = Cost(
        flops=2 * heads * (pairs * (2 * latent + rope) + queries * latent * (nope + value)),
        bytes=itemsize * (moved + 2 * queries * heads * 2 * latent),
    )
    expanded = Cost(
        flops=2 * heads * (pairs * (nope + rope + value) + context * latent * (nope + value)),
        bytes=itemsize * (moved + 2 * context * heads * (nope + value)),
    )
    dearer = absorbed.at(flops_per_byte) > expanded.at(flops_per_byte)
    return LatentForms(absorbed, expanded, "expanded" if dearer else "absorbed")
