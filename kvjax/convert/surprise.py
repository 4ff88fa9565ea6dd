"""A loss whose gradients say what a change of a model costs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, PRNGKeyArray

from kvjax.models import Decoder

LOGIT_ROWS = 128
"""Rows whose logits are held at once, in the backward pass too."""


def sampled_surprise(
    decoder: Decoder, hidden: Float32[Array, "T d"], key: PRNGKeyArray
) -> Float32[Array, ""]:
    """The sum of the negative log-probabilities of tokens that the model itself draws.

    The mean of its squared gradients is Fisher's information: half of it, times the square of a
    small change, is the KL divergence that the change leads to. Tokens of a text would measure how
    the model is wrong about it instead.

    Args:
      decoder: whose head to use.
      hidden: final states, one a token.
      key: of what is drawn.
    """
    count = hidden.shape[0]
    extra = -count % LOGIT_ROWS
    rows = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, LOGIT_ROWS, hidden.shape[1])
    real = (jnp.arange(count + extra, dtype=jnp.int32) < count).reshape(-1, LOGIT_ROWS)

    @jax.checkpoint
    def some(block: tuple[Array, Array, Array]) -> Array:
        hidden, real, key = block
        logits = decoder.logits(hidden)
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(logits), axis=1)
        chosen = jnp.take_along_axis(logits, drawn[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(real, jax.nn.logsumexp(logits, axis=1) - chosen, 0.0))

    keys = jax.random.split(key, rows.shape[0])
    return jnp.sum(jax.lax.map(some, (rows, real, keys)))
