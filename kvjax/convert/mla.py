"""A model with keys and values, made into one that keeps a latent a token (MLA)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from kvjax.convert.checkpoint import checkpoint_of
from kvjax.convert.compress import Axes, compressed, principal_axes
from kvjax.convert.latents_seen import latents_seen
from kvjax.convert.pairs import Pairs, kept, mixed_pairs
from kvjax.convert.rotation_needs import rotation_needs
from kvjax.convert.separate import separated
from kvjax.convert.share_out import shared_out
from kvjax.convert.texts import check_windows
from kvjax.decode.calls import Progress
from kvjax.decode.program import compiled
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model, check_own_keys, from_checkpoint
from kvjax.models import Checkpoint

MEASURED_TOKENS = 32_768
"""Tokens that a conversion measures unless it is told; some hundreds for each axis of a latent."""

UNIT = 8
"""Elements of a latent that are shared out among layers at once; of rotated ones, half as many."""


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What one layer kept.

    Attributes:
      rank: elements of its latent.
      rope_dim: elements that stay rotated.
      rotation: the share that stays of what its pairs' rotations do to the loss, 0 to 1.
      energy: the share that stays of what its latent does to the loss, 0 to 1.
    """

    rank: int
    rope_dim: int
    rotation: float
    energy: float


@dataclasses.dataclass(frozen=True, eq=False)
class Converted:
    """A model with latents, and what each layer kept."""

    checkpoint: Checkpoint
    layers: tuple[LayerReport, ...]


def convert_mla(
    model: Model,
    windows: Int32[np.ndarray, "n W"],
    *,
    rank: int,
    rope_dim: int,
    tokens: int = MEASURED_TOKENS,
    even: bool = False,
    seed: int = 0,
    pairs: Sequence[Pairs] | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Make a model with latents of a model with keys and values (TransMLA, arXiv:2502.07864).

    First the pairs of elements that RoPE turns are mixed across KV heads, and those that need
    their rotation most stay rotated, in one part that all heads share. Then the others, and the
    values, are kept by their principal axes, weighed by what errors cost. Both are measured on
    texts, forwards and back. A token then takes `rank + rope_dim` elements a layer on average:
    layers that need more have more.

    With `rope_dim` = KV heads x head_dim and `rank` the same, the model is exactly the same one.

    Args:
      model: without latents, sliding windows, soft caps or norms of queries and keys.
      windows: token ids of texts, a row each.
      rank: elements of a layer's latent, at most 2 x KV heads x head_dim - `rope_dim`.
      rope_dim: rotated elements of a layer, even, at most KV heads x head_dim.
      tokens: most that are measured, of all parts of the windows. Few hundred an axis are few: the
        axes are then those of these texts.
      even: whether all layers have the same sizes.
      seed: of the tokens that the loss draws.
      pairs: of `measured_pairs`, which serve all sizes; None measures them.
      progress: called with "convert" and how much of it is done.

    Raises:
      KvjaxError: the model is of another kind, a number is out of range, or there is no window.
    """
    check_convertible(model)
    check_sizes(model, rank=rank, rope_dim=rope_dim)
    check_integer("tokens", tokens, 1)
    check_integer("seed", seed, 0)
    check_windows(model, windows)
    report = progress or (lambda phase, share: None)
    report("convert", 0.0)
    if pairs is None:
        pairs = measured_pairs(
            model,
            windows,
            tokens=tokens,
            seed=seed,
            progress=lambda phase, share: report(phase, 0.5 * share),
        )
    counts = [rope_dim // 2] * len(pairs)
    if not even:
        needed = [np.sort(of_layer.lost.reshape(-1))[::-1] for of_layer in pairs]
        counts = shared_out(needed, rope_dim // 2, UNIT // 4)
    rotated = [kept(of_layer.lost, count) for of_layer, count in zip(pairs, counts, strict=True)]
    whole = separated(checkpoint_of(model), pairs, rotated)
    room = [layer.latent.rank for layer in whole.config.layers if layer.latent is not None]
    if sum(room) <= rank * len(room):
        report("convert", 1.0)
        return Converted(whole, _reports(pairs, rotated, None, room))
    between = from_checkpoint(whole, name=model.name, dtype=model.dtype)
    windows = _measured(windows, tokens)
    seen = _summed(
        between, windows, latents_seen, seed, lambda share: report("convert", 0.5 + 0.5 * share)
    )
    axes = [principal_axes(of_layer, windows.size) for of_layer in seen]
    ranks = [rank] * len(axes)
    if not even:
        ranks = shared_out([of_layer.costs for of_layer in axes], rank, UNIT)
    report("convert", 1.0)
    return Converted(compressed(whole, axes, ranks), _reports(pairs, rotated, axes, ranks))


def measured_pairs(
    model: Model,
    windows: Int32[np.ndarray, "n W"],
    *,
    tokens: int = MEASURED_TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Pairs]:
    """What each layer's pairs lose without their rotations: the first half of a conversion.

    Args:
      model: one that `check_convertible` lets pass.
      windows: see `convert_mla`.
      tokens: see `convert_mla`.
      seed: see `convert_mla`.
      progress: called with "convert" and how much of it is done.

    Raises:
      KvjaxError: a number is out of range, or there is no window.
    """
    check_integer("tokens", tokens, 1)
    check_integer("seed", seed, 0)
    check_windows(model, windows)
    report = progress or (lambda phase, share: None)
    needs = _summed(
        model,
        _measured(windows, tokens),
        rotation_needs,
        seed,
        lambda share: report("convert", share),
    )
    return [mixed_pairs(of_layer) for of_layer in needs]


def check_convertible(model: Model) -> None:
    """Refuse a model whose keys and values are not plain projections.

    Args:
      model: the caller's.

    Raises:
      KvjaxError: it has latents, windows, soft caps, norms of queries and keys, or layers that make
        no keys.
    """
    config = model.config
    check_own_keys(model, "latents are made for", "convert a Llama, Mistral or Qwen2 model")
    for index, layer in enumerate(config.layers):
        if layer.latent is not None:
            raise KvjaxError(
                f"{model.name} keeps latents already (layer {index}: {layer.latent.rank} elements "
                f"and {layer.rope_dim} rotated): convert a model that keeps keys and values"
            )
        if layer.window is not None:
            raise KvjaxError(
                f"{model.name} has a sliding window of {layer.window} tokens in layer {index}: "
                f"layers with latents see all tokens; convert a model without windows"
            )
    if config.qk_norm:
        raise KvjaxError(
            f"{model.name} normalises every head's keys, which no projection of a latent does: "
            f"convert a Llama, Mistral or Qwen2 model"
        )
    if config.attn_soft_cap is not None:
        raise KvjaxError(
            f"{model.name} has a soft cap of {config.attn_soft_cap} on its scores, which attention "
            f"to latents has not: convert a Llama, Mistral or Qwen2 model"
        )


def check_sizes(model: Model, *, rank: int, rope_dim: int) -> None:
    """Refuse sizes that a model has no room for.

    Args:
      model: one that `check_convertible` lets pass.
      rank: elements of a layer's latent.
      rope_dim: rotated elements of a layer.

    Raises:
      KvjaxError: one is out of range; the message says what is allowed.
    """
    check_integer("rank", rank, 1)
    check_integer("rope_dim", rope_dim, 2, ", and even: RoPE turns pairs")
    most = min(layer.num_kv_heads * layer.head_dim for layer in model.config.layers)
    if rope_dim % 2 or rope_dim > most:
        raise KvjaxError(
            f"rope_dim is {rope_dim}: must be even and at most {most}, the elements of all KV "
            f"heads' keys in a layer of {model.name}"
        )
    if rank > 2 * most - rope_dim:
        raise KvjaxError(
            f"rank is {rank}: must be at most {2 * most - rope_dim}, what is left of a layer's "
            f"{2 * most} elements beside rope_dim={rope_dim}; more would take more than keys and "
            f"values do"
        )


def _measured(windows: Int32[np.ndarray, "n W"], tokens: int) -> Int32[np.ndarray, "m W"]:
    """Of many windows, as many as are measured, from all parts of the texts."""
    most = max(tokens // windows.shape[1], 1)
    return windows[:: -(-len(windows) // most)]


def _summed(model: Model, windows: Any, of_window: Any, seed: int, done: Any) -> list[Any]:
    """Sums of what windows give, a layer at a time, in float64 as NumPy arrays."""
    total: list[Any] = []
    key = jax.random.key(seed)
    for index, window in enumerate(windows):
        given = (model.params, jnp.asarray(window, jnp.int32), jax.random.fold_in(key, index))
        program, _ = compiled(of_window, model.graphdef, *given)
        new = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(program(*given)))
        total = list(new) if not total else jax.tree.map(np.add, total, list(new))
        done((index + 1) / len(windows))
    return total


def _reports(
    pairs: Sequence[Pairs],
    rotated: Sequence[np.ndarray],
    axes: Sequence[Axes] | None,
    ranks: Sequence[int],
) -> tuple[LayerReport, ...]:
    reports = []
    for index, (of_layer, stay) in enumerate(zip(pairs, rotated, strict=True)):
        gone = of_layer.lost.sum() - of_layer.lost[tuple(stay.T)].sum()
        energy = 1.0
        if axes is not None:
            costs = axes[index].costs
            energy = float(costs[: ranks[index]].sum() / max(costs.sum(), 1e-300))
        reports.append(
            LayerReport(
                rank=ranks[index],
                rope_dim=2 * len(stay),
                rotation=float(1 - gone / max(of_layer.whole.sum(), 1e-300)),
                energy=energy,
            )
        )
    return tuple(reports)
