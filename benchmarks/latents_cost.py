"""What attention to latents costs absorbed and expanded: arithmetic, bytes, and time on a CPU.

    python -m benchmarks.latents_cost [--quick] [--json FILE]

Arithmetic and bytes are those that XLA counts of the compiled program of each form, of one layer
and one sequence. Time is of the kernels that a prompt's chunks run, with random numbers.
"""

import functools
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from benchmarks import report
from benchmarks.report import Row
from kvjax.pallas_kernels import (
    LatentDims,
    absorbed_or_expanded,
    expanded_latent_attention,
    ragged_latent_attention,
)

Form = Literal["absorbed", "expanded"]
FORMS: tuple[Form, Form] = ("absorbed", "expanded")
HIGHEST = jax.lax.Precision.HIGHEST
PAGE, CHUNK = 16, 512


class Shape(NamedTuple):
    """A layer: its name, its query heads and its widths."""

    name: str
    heads: int
    dims: LatentDims


V3 = Shape("DeepSeek-V3", 128, LatentDims(latent=512, rope=64, nope=128, value=128))
SMALL = Shape("SmolLM2-135M converted", 9, LatentDims(latent=224, rope=64, nope=64, value=64))
TINY = Shape("tiny", 4, LatentDims(latent=32, rope=8, nope=16, value=16))
MEASURED = Shape("DeepSeek-V3 of 16 heads", 16, V3.dims)


class Layer(NamedTuple):
    """Both matrices of a layer: `k_up` [H, nope, Dc] and `v_up` [H, value, Dc]."""

    k_up: Float32[Array, "H nope Dc"]
    v_up: Float32[Array, "H Dv Dc"]

    def absorb(self, q_nope: Float32[Array, "T H nope"]) -> Float32[Array, "T H Dc"]:
        """Queries for latents."""
        return jnp.einsum("thn,hnc->thc", q_nope, self.k_up, precision=HIGHEST)

    def values_of(self, mean: Float32[Array, "T H Dc"]) -> Float32[Array, "T H Dv"]:
        """Means of values, of means of latents."""
        return jnp.einsum("thc,hvc->thv", mean, self.v_up, precision=HIGHEST)

    def expand(
        self, latents: Float32[Array, "S Dc"], ropes: Float32[Array, "S Dr"]
    ) -> tuple[Float32[Array, "S H D"], Float32[Array, "S H Dv"]]:
        """Every head's keys and values."""
        own = jnp.einsum("sc,hnc->shn", latents, self.k_up, precision=HIGHEST)
        shared = jnp.broadcast_to(ropes[:, None], (*own.shape[:2], ropes.shape[1]))
        values = jnp.einsum("sc,hvc->shv", latents, self.v_up, precision=HIGHEST)
        return jnp.concatenate([own, shared], axis=2), values


def plain(
    form: Form,
    scale: float,
    layer: Layer,
    q_nope: Float32[Array, "T H nope"],
    q_rope: Float32[Array, "T H Dr"],
    latents: Float32[Array, "S Dc"],
    ropes: Float32[Array, "S Dr"],
) -> Float32[Array, "T H Dv"]:
    """Causal attention of the newest T of S tokens, without pages and loops, in one form."""
    einsum = functools.partial(jnp.einsum, precision=HIGHEST)
    rope = einsum("thr,sr->hts", q_rope, ropes)
    if form == "absorbed":
        scores = rope + einsum("thc,sc->hts", layer.absorb(q_nope), latents)
    else:
        keys, values = layer.expand(latents, ropes)
        scores = einsum("thd,shd->hts", jnp.concatenate([q_nope, q_rope], axis=2), keys)
    queries, context = len(q_nope), len(latents)
    last = jnp.arange(context - queries, context)[:, None]
    visible = jnp.arange(context)[None] <= last
    weights = jax.nn.softmax(jnp.where(visible[None], scale * scores, -jnp.inf), axis=2)
    if form == "absorbed":
        return layer.values_of(einsum("hts,sc->thc", weights, latents))
    return einsum("hts,shv->thv", weights, values)


def scale_of(shape: Shape) -> float:
    """1 / sqrt of what a head's key has, never of the latent's width."""
    return float((shape.dims.nope + shape.dims.rope) ** -0.5)


def counted(shape: Shape, queries: int, context: int, form: Form) -> tuple[float, float]:
    """Operations and bytes of the compiled program."""
    heads, (latent, rope, nope, value) = shape.heads, shape.dims
    sizes = ((queries, heads, nope), (queries, heads, rope), (context, latent), (context, rope))
    matrices = ((heads, nope, latent), (heads, value, latent))
    layer, rest = (
        [jax.ShapeDtypeStruct(size, jnp.float32) for size in group] for group in (matrices, sizes)
    )
    program = jax.jit(functools.partial(plain, form, scale_of(shape)))
    cost = program.lower(Layer(*layer), *rest).compile().cost_analysis()
    return float(cost["flops"]), float(cost["bytes accessed"])


def counted_rows(shape: Shape, queries: int, context: int) -> list[Row]:
    """The form that the cost model picks, against the other one."""
    picked = absorbed_or_expanded(queries, context, shape.heads, shape.dims).cheaper
    other = FORMS[FORMS[0] == picked]
    ours, theirs = (counted(shape, queries, context, form) for form in (picked, other))
    words = "1 query" if queries == 1 else f"{queries} queries"
    claim = f"{shape.name}, {words}, {context} tokens: {picked}"
    return [
        Row(
            claim=claim,
            metric=metric,
            unit=unit,
            ours=ours[at],
            baseline=other,
            baseline_value=theirs[at],
            aim="<= 1" if metric == "arithmetic" else None,
        )
        for at, (metric, unit) in enumerate((("arithmetic", "operations"), ("moved", "bytes")))
    ]


def prefills(shape: Shape, tokens: int) -> dict[Form, Callable[[], Array]]:
    """Attention of a whole prompt, a chunk after another, as one call of each form."""
    rng = np.random.default_rng(0)

    def drawn(*size: int) -> Float32[Array, "..."]:
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    heads, (latent, rope, nope, value) = shape.heads, shape.dims
    layer = Layer(drawn(heads, nope, latent) / latent**0.5, drawn(heads, value, latent))
    pages = tokens // PAGE
    pools = drawn(pages, PAGE, latent), drawn(pages, PAGE, rope)
    tables = jnp.arange(pages, dtype=jnp.int32)[None]
    q_nope, q_rope = drawn(tokens, heads, nope), drawn(tokens, heads, rope)
    starts, scale = jnp.asarray([0, CHUNK], jnp.int32), scale_of(shape)

    @functools.partial(jax.jit, static_argnums=0)
    def chunk(form: Form, layer: Layer, q_nope: Array, q_rope: Array, length: Array) -> Array:
        ends = tables, length, starts
        if form == "absorbed":
            queries = layer.absorb(q_nope), q_rope
            mean = ragged_latent_attention(
                *queries, *pools, *ends, scale=scale, implementation="xla"
            )
            return layer.values_of(mean.out)
        both = jnp.concatenate([q_nope, q_rope], axis=2)
        made = layer.expand
        return expanded_latent_attention(both, *pools, *ends, expand=made, scale=scale).out

    def whole(form: Form) -> Array:
        outs = [
            chunk(form, layer, q_nope[at:end], q_rope[at:end], jnp.asarray([end], jnp.int32))
            for at in range(0, tokens, CHUNK)
            for end in (at + CHUNK,)
        ]
        return jnp.concatenate(outs)

    return {form: functools.partial(whole, form) for form in FORMS}


def timed_row(shape: Shape, tokens: int, times: int) -> Row:
    """Seconds of both forms in turn, the least of some times each."""
    calls = prefills(shape, tokens)
    first, second = (np.asarray(call()) for call in calls.values())
    np.testing.assert_allclose(first, second, atol=1e-3)
    seconds: dict[Form, list[float]] = {form: [] for form in FORMS}
    for _ in range(times):
        for form, call in calls.items():
            began = time.perf_counter()
            call().block_until_ready()
            seconds[form].append(time.perf_counter() - began)
    return Row(
        claim=f"{shape.name}, prompt of {tokens} tokens in chunks of {CHUNK}: expanded",
        metric="time of a layer's attention, XLA, float32",
        unit="s",
        ours=min(seconds["expanded"]),
        baseline="absorbed",
        baseline_value=min(seconds["absorbed"]),
        aim="<= 1",
    )


def main() -> None:
    """Count both forms, and time them."""
    options = report.parser(__doc__.splitlines()[0]).parse_args()
    cases = [(V3, 1, 4096), (V3, CHUNK, 4096), (TINY, 1, 1024), (TINY, CHUNK, 1024)]
    if not options.quick:
        cases += [(V3, 128, 4096), (V3, 256, 4096), (SMALL, 1, 4096), (SMALL, CHUNK, 4096)]
        cases += [(V3, 1, 32_768), (V3, CHUNK, 32_768)]
    rows = [row for case in cases for row in counted_rows(*case)]
    rows += [timed_row(MEASURED, 2048, 1 if options.quick else 5)]
    rows += [timed_row(SMALL, 2048, 1 if options.quick else 5)]
    body = (
        "The form that `absorbed_or_expanded` picks, against the other one. Arithmetic and bytes "
        "are XLA's counts of compiled programs of one layer and one sequence in float32, in which "
        "scores of all pairs are made and stored, those that causality hides too: the same number "
        "in both forms, which the kernels, block by block, do not store. So the ratio of bytes is "
        "nearer to 1 than that of latents, keys and values alone. Time is of the kernels, matrices "
        "included, on this machine's CPU, the least of five in turn."
    )
    report.finish(rows, options, name="latents-cost", title="Absorbed and expanded", body=body)


if __name__ == "__main__":
    main()
