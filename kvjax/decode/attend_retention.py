"""Gated retention over the states of a cache: token by token, and a chunk at once.

Both are one recurrence, S = gate S + k v^T and out = q S (YOCO, arXiv:2405.05254, section 3.1); a
chunk is done in blocks, whose tokens see each other by pairs and those before by the state.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

BLOCK = 64
"""Tokens that see each other by pairs: about the size of a head, where both ways cost the same."""

_HIGHEST = lax.Precision.HIGHEST


def retain_token(
    states: Float32[Array, "B H D Dv"],
    q: Float[Array, "B H D"],
    k: Float[Array, "B H D"],
    v: Float[Array, "B H Dv"],
    log_gates: Float[Array, "B H"],
    stores: Bool[Array, " B"],
) -> tuple[Float32[Array, "B H Dv"], Float32[Array, "B H D Dv"]]:
    """One new token a sequence.

    Args:
      states: float32 [B, H, D, Dv], of the tokens before.
      q: [B, H, D], as `kvjax.models.RetainingAttend` says.
      k: [B, H, D].
      v: [B, H, Dv].
      log_gates: [B, H].
      stores: bool [B], sequences that the token is one of; the states of others stay.

    Returns:
      What the queries get, float32 [B, H, Dv], and the states with the tokens.
    """
    made = k[..., None] * v[:, :, None]
    states = jnp.where(stores[:, None, None, None], _kept(states, log_gates) + made, states)
    return jnp.einsum("bhk,bhkv->bhv", q, states, precision=_HIGHEST), states


def retain_chunk(
    states: Float32[Array, "B H D Dv"],
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H Dv"],
    log_gates: Float[Array, "T H"],
    cu_lengths: Int32[Array, " B1"],
) -> tuple[Float32[Array, "T H Dv"], Float32[Array, "B H D Dv"]]:
    """A ragged chunk of new tokens, `BLOCK` of one sequence after another.

    Args:
      states: float32 [B, H, D, Dv], of the tokens before the chunk.
      q: [T, H, D], as `kvjax.models.RetainingAttend` says.
      k: [T, H, D].
      v: [T, H, Dv].
      log_gates: [T, H].
      cu_lengths: int32 [B + 1], where each sequence's tokens start in the chunk; those behind the
        last are padding, which gets zeros.

    Returns:
      What the queries get, float32 [T, H, Dv], and the states with the tokens.
    """
    blocks = -(-jnp.diff(cu_lengths) // BLOCK)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    padded = [jnp.pad(x, ((0, BLOCK), *[(0, 0)] * (x.ndim - 1))) for x in (q, k, v, log_gates)]
    place = jnp.arange(BLOCK, dtype=jnp.int32)

    def next_block(i: Int32[Array, ""], both: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = both
        row = jnp.searchsorted(ends, i, side="right", method="scan").astype(jnp.int32)
        begin = cu_lengths[row] + (i - ends[row] + blocks[row]) * BLOCK
        live = begin + place < cu_lengths[row + 1]
        given = [lax.dynamic_slice_in_dim(x, begin, BLOCK) for x in padded]
        # Zeros leave a state as it is, whatever stands in the tokens of others.
        given = [jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in given]
        made, state = _block(states[row], *given)
        before = lax.dynamic_slice_in_dim(out, begin, BLOCK)
        made = jnp.where(live[:, None, None], made, before)
        return lax.dynamic_update_slice_in_dim(out, made, begin, 0), states.at[row].set(state)

    out = jnp.zeros((q.shape[0] + BLOCK, *v.shape[1:]), jnp.float32)
    out, states = lax.fori_loop(0, ends[-1], next_block, (out, states))
    return out[: q.shape[0]], states


def _block(
    state: Float32[Array, "H D Dv"],
    q: Float[Array, "t H D"],
    k: Float[Array, "t H D"],
    v: Float[Array, "t H Dv"],
    log_gates: Float[Array, "t H"],
) -> tuple[Float32[Array, "t H Dv"], Float32[Array, "H D Dv"]]:
    """Some tokens of one sequence. Sums of logarithms are never differences of larger ones."""
    place = jnp.arange(q.shape[0], dtype=jnp.int32)
    later = (place[:, None] > place[None])[..., None]
    between = jnp.cumsum(jnp.where(later, log_gates[:, None], 0), axis=0)  # [t, s, H]
    seen = (place[:, None] >= place[None])[..., None]
    scores = jnp.einsum("thk,shk->tsh", q, k, precision=_HIGHEST)
    scores = jnp.where(seen, scores * jnp.exp(between), 0)
    out = jnp.einsum("tsh,shv->thv", scores, v, precision=_HIGHEST)
    so_far = jnp.exp(jnp.cumsum(log_gates, axis=0))
    out += jnp.einsum("thk,hkv->thv", q * so_far[..., None], state, precision=_HIGHEST)
    to_come = jnp.exp(between[-1])
    made = jnp.einsum("thk,thv->hkv", k * to_come[..., None], v, precision=_HIGHEST)
    return out, _kept(state, jnp.sum(log_gates, axis=0)) + made


def _kept(
    states: Float32[Array, "*B H D Dv"], log_gates: Float[Array, "*B H"]
) -> Float32[Array, "*B H D Dv"]:
    return states * jnp.exp(log_gates)[..., None, None]
