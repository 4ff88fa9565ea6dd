"""Healing by distillation: a converted model learns to predict what the original does."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int32

from kvjax.convert.checkpoint import checkpoint_of
from kvjax.convert.healing_files import HealingFiles
from kvjax.convert.judge import final_states
from kvjax.convert.surprise import LOGIT_ROWS
from kvjax.convert.texts import check_windows, positions_of
from kvjax.decode.identity import fingerprint
from kvjax.decode.program import compiled
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model, from_checkpoint
from kvjax.models import Checkpoint, Decoder, causal_attend

Parts = Literal["attention", "all"]
Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Healing:
    """How a converted model is trained.

    Attributes:
      steps: how many times weights change, one window of text each.
      parts: what changes: attention's projections, or all weights but the embedding and the head.
      learning_rate: of Adam at its height; it rises over the first tenth of the steps, and falls
        to a tenth of its height along a cosine.
      seed: of the order of windows.
      keep_every: steps after which what was learnt is kept, where there is a folder for it.

    Raises:
      KvjaxError: a number or a name is out of range.
    """

    steps: int
    parts: Parts = "attention"
    learning_rate: float = 3e-4
    seed: int = 0
    keep_every: int = 25

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1)
        check_integer("seed", self.seed, 0)
        check_integer("keep_every", self.keep_every, 1)
        if self.parts not in ("attention", "all"):
            raise KvjaxError(f"parts is {self.parts!r}: must be 'attention' or 'all'")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise KvjaxError(f"learning_rate is {self.learning_rate!r}: must be a positive number")

    def optimizer(self) -> optax.GradientTransformation:
        """Adam on gradients of at most unit length."""
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.1 * self.learning_rate,
            peak_value=self.learning_rate,
            warmup_steps=max(self.steps // 10, 1),
            decay_steps=max(self.steps, 2),
            end_value=0.1 * self.learning_rate,
        )
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))


@dataclasses.dataclass(frozen=True, eq=False)
class Healed:
    """What training gave.

    Attributes:
      checkpoint: the model.
      losses: of every step, the KL divergence from the original on its window, nats a token.
      files: what was kept on the way, to `drop` once the model is written.
    """

    checkpoint: Checkpoint
    losses: tuple[float, ...]
    files: HealingFiles


def heal(
    original: Model,
    converted: Checkpoint,
    windows: Int32[np.ndarray, "n W"],
    healing: Healing,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Healed:
    """Train a converted model on the original's distributions (KL divergence, forwards).

    The same seed, texts and machine give the same weights, also where a run was stopped and goes
    on from `folder`.

    Args:
      original: what to learn from.
      converted: of `convert_mla`.
      windows: token ids of texts, a row each; used over and over, in an order of the seed's.
      healing: how.
      folder: where to keep, as Orbax checkpoints, what was learnt so far, and to go on from if
        there is something; None keeps nothing.
      progress: called with the steps done and the last one's loss.

    Raises:
      KvjaxError: there is no window, an id is not in the vocabulary, `folder` holds what another
        model, other texts or other settings gave or what is no run, or a loss is not finite.
    """
    check_windows(original, windows)
    student = from_checkpoint(converted, name="converted", dtype="float32")
    weights = checkpoint_of(student).weights
    learnt = {name: jnp.asarray(x) for name, x in weights.items() if _learns(name, healing.parts)}
    fixed = {name: jnp.asarray(x) for name, x in weights.items() if name not in learnt}
    files = HealingFiles.at(folder, _identity(original, student, windows, healing))
    optimizer = healing.optimizer()
    state = optimizer.init(learnt)
    step, losses, (learnt, state) = files.newest((learnt, state))
    order = _order(len(windows), healing)
    used = sorted(set(order[step:]))
    exact = dict(zip(used, final_states(original, windows[used]), strict=True)) if used else {}
    static = (student.graphdef, original.graphdef, healing)
    for index in order[step:]:
        given = (learnt, state, fixed, original.params, exact[index], windows[index])
        program, _ = compiled(_step, static, *given, donate=(0, 1))
        learnt, state, loss = program(*given)
        losses.append(float(loss))
        step += 1
        if not math.isfinite(losses[-1]):
            raise KvjaxError(
                f"learning_rate is {healing.learning_rate}: the loss is not finite after {step} "
                f"steps; learn more slowly"
            )
        if progress is not None:
            progress(step, losses[-1])
        if step % healing.keep_every == 0 and step < healing.steps:
            files.keep(step, losses, (learnt, state))
    made = {name: np.asarray(x) for name, x in {**fixed, **learnt}.items()}
    return Healed(dataclasses.replace(converted, weights=made), tuple(losses), files)


def _learns(name: str, parts: Parts) -> bool:
    return ".attention." in name if parts == "attention" else name.startswith("layers.")


def _order(windows: int, healing: Healing) -> list[int]:
    """Which window each step sees: all of them once, in some order, then all again."""
    random = np.random.default_rng(healing.seed)
    turns = -(-healing.steps // windows)
    order = np.concatenate([random.permutation(windows) for _ in range(turns)])
    return [int(index) for index in order[: healing.steps]]


def _identity(
    original: Model, student: Model, windows: Int32[np.ndarray, "n W"], healing: Healing
) -> dict[str, Any]:
    """What must be equal for a run to go on where another one stopped."""
    return {
        "original": fingerprint(original),
        "converted": fingerprint(student),
        "texts": hashlib.sha256(np.ascontiguousarray(windows).tobytes()).hexdigest(),
        **{k: v for k, v in dataclasses.asdict(healing).items() if k != "keep_every"},
    }


def _step(
    static: tuple[Any, Any, Healing],
    learnt: Arrays,
    state: Any,
    fixed: Arrays,
    original: Any,
    exact: Float32[Array, "W d"],
    tokens: Int32[Array, " W"],
) -> tuple[Arrays, Any, Float32[Array, ""]]:
    """One window, one change of weights."""
    graphdef, original_graphdef, healing = static
    teacher: Decoder = nnx.merge(original_graphdef, original)

    def loss(learnt: Arrays) -> Array:
        decoder: Decoder = nnx.merge(graphdef, _nested({**fixed, **learnt}))
        return divergence(teacher, decoder, exact, tokens)

    value, slopes = jax.value_and_grad(loss)(learnt)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        changes, state = healing.optimizer().update(slopes, state, learnt)
    return optax.apply_updates(learnt, changes), state, value


def divergence(
    teacher: Decoder,
    decoder: Decoder,
    exact: Float32[Array, "W d"],
    tokens: Int32[Array, " W"],
) -> Float32[Array, ""]:
    """The mean KL divergence from a teacher's distributions after each token, in nats.

    Args:
      teacher: whose head makes distributions of `exact`.
      decoder: what is judged.
      exact: the teacher's final states.
      tokens: int32 [W], a text of its own.
    """
    positions = positions_of(tokens)
    plain = causal_attend(decoder.config, jnp.zeros_like(tokens), positions)

    def attend(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, None]:
        return jax.checkpoint(lambda q, k, v: plain(layer, q, k, v, None)[0])(q, k, v), state

    hidden, _ = decoder(tokens, positions, attend, None)
    count = tokens.shape[0]
    extra = -count % LOGIT_ROWS

    def blocks(x: Array) -> Array:
        return jnp.pad(x, ((0, extra), (0, 0))).reshape(-1, LOGIT_ROWS, x.shape[1])

    real = (jnp.arange(count + extra, dtype=jnp.int32) < count).reshape(-1, LOGIT_ROWS)

    @jax.checkpoint
    def some(block: tuple[Array, Array, Array]) -> Array:
        exact, mine, real = block
        p = jax.nn.log_softmax(teacher.logits(exact), axis=-1)
        q = jax.nn.log_softmax(decoder.logits(mine), axis=-1)
        return jnp.sum(jnp.where(real, jnp.sum(jnp.exp(p) * (p - q), axis=-1), 0.0))

    return jnp.sum(jax.lax.map(some, (blocks(exact), blocks(hidden), real))) / count


def _nested(named: Arrays) -> dict[Any, Any]:
    """Parameters as nested dicts, of their names."""
    params: dict[Any, Any] = {}
    for name, value in named.items():
        *path, last = name.split(".")
        inner = params
        for part in path:
            inner = inner.setdefault(int(part) if part.isdigit() else part, {})
        inner[last] = value
    return params


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """Means of the last `width` losses, or of as many as there are.

    Args:
      losses: one a step.
      width: at least 1.
    """
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    starts = [max(end - width, 0) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]
