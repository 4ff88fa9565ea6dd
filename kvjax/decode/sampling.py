"""Choosing the next token from logits."""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

from kvjax.errors import KvjaxError, check_integer

MIN_TEMPERATURE = 1e-6
"""Below it a draw is greedy up to rounding."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The filters apply in the order of the fields.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token, and no filter.
      top_k: only the k most likely tokens stay; None keeps all.
      top_p: only the most likely tokens whose probabilities first sum to p stay (nucleus sampling,
        arXiv:1904.09751, section 3.1); None keeps all.
      min_p: only tokens at least min_p times as likely as the most likely one stay
        (arXiv:2407.01082, section 3); None keeps all.

    Raises:
      KvjaxError: a value is out of range, or a filter comes with temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        heat = self.temperature
        if not _is_number(heat) or not (heat == 0 or MIN_TEMPERATURE <= heat < math.inf):
            raise KvjaxError(
                f"temperature is {heat!r}: must be 0 (greedy) or a number of at least "
                f"{MIN_TEMPERATURE}"
            )
        if self.top_k is not None:
            top_k = check_integer("top_k", self.top_k, 1, ", or None")
            object.__setattr__(self, "top_k", top_k)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= 1):
                raise KvjaxError(f"{name} is {value!r}: must be above 0 and at most 1, or None")
        for name in ("top_k", "top_p", "min_p"):
            if heat == 0 and getattr(self, name) is not None:
                raise KvjaxError(
                    f"{name} is {getattr(self, name)!r} and temperature is 0, which takes the "
                    f"likeliest token in any case: give a temperature, such as 1.0, or leave out "
                    f"{name}"
                )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """A `Sampling` inside a program: numbers are arrays, so that changing them compiles nothing."""

    temperature: Float[Array, ""]
    top_k: Int32[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    greedy: bool = dataclasses.field(metadata={"static": True})
    sorts: bool = dataclasses.field(metadata={"static": True})  # top_k or top_p is in use

    def __call__(
        self, logits: Float[Array, "B V"], key: Key[Array, ""], step: Int32[Array, ""]
    ) -> Int32[Array, " B"]:
        """Draw one token a row.

        Args:
          logits: float32 [B, V].
          key: the generation's key; a row's draw depends on it, on `step` and on the row's index,
            not on what other rows hold.
          step: int32, how many tokens were drawn before.

        Returns:
          Token ids, int32 [B].
        """
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Differences from the best, so that no division by a small temperature overflows.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        kept, order = self._filtered(below / self.temperature)
        step_key = jax.random.fold_in(key, step)
        rows = jnp.arange(logits.shape[0], dtype=jnp.uint32)
        keys = jax.vmap(lambda row: jax.random.fold_in(step_key, row))(rows)
        drawn = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        if order is None:
            return drawn
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]

    def _filtered(
        self, logits: Float[Array, "B V"]
    ) -> tuple[Float[Array, "B V"], Int32[Array, "B V"] | None]:
        """Logits with -inf where a token is out, and, if they were sorted, whose they are."""
        out = jnp.float32(-jnp.inf)
        order = None
        if self.sorts:
            # Ranks rather than thresholds: of equally likely tokens, top_k keeps the lower ids.
            order = jnp.argsort(-logits, axis=-1, stable=True).astype(jnp.int32)
            logits = jnp.take_along_axis(logits, order, axis=-1)
            place = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
            logits = jnp.where(place < self.top_k, logits, out)
            probability = jax.nn.softmax(logits, axis=-1)
            before = jnp.cumsum(probability, axis=-1) - probability
            logits = jnp.where((before < self.top_p) | (place == 0), logits, out)
        best = jnp.max(logits, axis=-1, keepdims=True)
        return jnp.where(logits >= best + jnp.log(self.min_p), logits, out), order


def make_sampler(sampling: Sampling, vocab_size: int) -> Sampler:
    """The program's form of a `Sampling`.

    Args:
      sampling: what the caller wants.
      vocab_size: V; the `top_k` that keeps all.
    """
    top_k = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
    return Sampler(
        temperature=jnp.float32(sampling.temperature or 1.0),
        top_k=jnp.int32(top_k),
        # Rounded sums of probabilities reach 1 before the last token: 1 would not keep all.
        top_p=jnp.float32(2.0 if sampling.top_p in (None, 1) else sampling.top_p),
        # log(0) would be -inf and keep all as well, but NaN where the best logit is infinite.
        min_p=jnp.float32(1e-30 if sampling.min_p is None else sampling.min_p),
        greedy=sampling.temperature == 0,
        sorts=sampling.top_k is not None or sampling.top_p is not None,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
