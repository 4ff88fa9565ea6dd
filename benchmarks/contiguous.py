"""Bandwidth of paged decode attention against contiguous attention, in one process.

Two programs attend in every layer, one after the other: one over pages whose ids are shuffled, one
over contiguous keys and values. All layers' keys and values differ, so that they come from memory
and not from the processor's cache.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from kvjax.models import ModelConfig
from kvjax.pallas_kernels import paged_attention

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Bandwidths:
    """Bytes of keys and values a second, and the bytes of one call."""

    paged: float
    contiguous: float
    kv_bytes: int
    difference: float  # greatest, of the two outputs; they must be the same attention


def contiguous_attention(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B Hkv T D"],
    v: Float[Array, "B Hkv T D"],
    scale: float,
) -> Float[Array, "B Hq D"]:
    """Attend to all T keys, as a model with a plain cache does."""
    batch, heads, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], dim)
    to_keys = (((3,), (3,)), ((0, 1), (0, 1)))
    scores = jax.lax.dot_general(
        grouped.astype(k.dtype), k, to_keys, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(scores * scale, axis=-1)
    to_values = (((3,), (2,)), ((0, 1), (0, 1)))
    out = jax.lax.dot_general(
        weights.astype(v.dtype), v, to_values, preferred_element_type=jnp.float32
    )
    return out.reshape(batch, heads, dim).astype(q.dtype)


def measure(
    config: ModelConfig, context: int, batch: int, dtype: str, repeats: int = 7
) -> Bandwidths:
    """Time both programs in turn and take each one's best.

    Args:
      config: for the shapes of its layers' attention; windows are not applied.
      context: T, tokens of every sequence.
      batch: B.
      dtype: of keys and values.
      repeats: runs of each.
    """
    rng = np.random.default_rng(0)
    pages = -(-context // PAGE_SIZE)
    shuffled = rng.permutation(batch * pages).reshape(batch, pages)
    tables, lengths = jnp.asarray(shuffled, jnp.int32), jnp.full((batch,), context, jnp.int32)
    heads = [(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in config.layers]
    scales = [config.scale(index) for index in range(len(heads))]
    kv = []
    for index, (_, kv_heads, dim) in enumerate(heads):
        shape = (batch, kv_heads, pages * PAGE_SIZE, dim)
        pair = jax.random.normal(jax.random.key(index), (2, *shape), jnp.dtype(dtype))
        kv.append((pair[0], pair[1]))
    inverse = np.argsort(shuffled.reshape(-1))
    pools = [tuple(_paginate(array, inverse) for array in pair) for pair in kv]
    queries = jax.random.normal(jax.random.key(99), (batch, heads[0][0], heads[0][2]))

    def over_layers(attend: Callable[[int, Array], Array]) -> Callable[[Array], Array]:
        def program(q: Array) -> Array:
            for index in range(len(heads)):
                q = q + attend(index, q)  # so that no layer can start before the one below it
            return q

        return program

    def paged(
        q: Array,
        pools: list[tuple[Array, ...]],
        tables: Int32[Array, "B M"],
        lengths: Int32[Array, " B"],
    ) -> Array:
        def attend(index: int, q: Array) -> Array:
            k, v = pools[index]
            return paged_attention(q, k, v, tables, lengths, scale=scales[index]).out

        return over_layers(attend)(q)

    def contiguous(q: Array, kv: list[tuple[Array, Array]]) -> Array:
        def attend(index: int, q: Array) -> Array:
            k, v = kv[index]
            return contiguous_attention(q, k[:, :, :context], v[:, :, :context], scales[index])

        return over_layers(attend)(q)

    programs = {
        "paged": jax.jit(paged).lower(queries, pools, tables, lengths).compile(),
        "contiguous": jax.jit(contiguous).lower(queries, kv).compile(),
    }
    inputs = {"paged": (queries, pools, tables, lengths), "contiguous": (queries, kv)}
    outputs = {name: program(*inputs[name]) for name, program in programs.items()}
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(repeats):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(*inputs[name]))
            best[name] = min(best[name], time.perf_counter() - begin)
    size = jnp.dtype(dtype).itemsize
    kv_bytes = sum(2 * batch * context * count * dim * size for _, count, dim in heads)
    return Bandwidths(
        paged=kv_bytes / best["paged"],
        contiguous=kv_bytes / best["contiguous"],
        kv_bytes=kv_bytes,
        difference=float(jnp.max(jnp.abs(outputs["paged"] - outputs["contiguous"]))),
    )


def _paginate(array: Float[Array, "B Hkv T D"], order: np.ndarray) -> Float[Array, "N Hkv P D"]:
    """Cut sequences into pages, put in the order of their ids."""
    batch, heads, tokens, dim = array.shape
    cut = array.reshape(batch, heads, tokens // PAGE_SIZE, PAGE_SIZE, dim)
    return cut.transpose(0, 2, 1, 3, 4).reshape(-1, heads, PAGE_SIZE, dim)[order]
