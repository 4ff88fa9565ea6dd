"""Smaller latents: the principal axes of what errors of them cost."""

import dataclasses

import numpy as np
from jaxtyping import Float64

from kvjax.convert.latents_seen import LatentsSeen
from kvjax.models import Checkpoint

_RIDGE = 1e-4  # of the mean slope: directions that cost nothing on these texts still cost something


@dataclasses.dataclass(frozen=True)
class Axes:
    """One layer's latents in other coordinates: `down @ (latent - mean)`, and back by `up`.

    Attributes:
      mean: of latents.
      down: an axis a row, those first that cost most.
      up: its inverse.
      costs: what leaving an axis out costs, in nats a token to second order.
    """

    mean: Float64[np.ndarray, " R"]
    down: Float64[np.ndarray, "R R"]
    up: Float64[np.ndarray, "R R"]
    costs: Float64[np.ndarray, " R"]


def principal_axes(seen: LatentsSeen, tokens: int) -> Axes:
    """The axes that keys and values together are best kept by.

    An error e of a token's latent costs e F e / 2, F being the mean product of the loss's
    gradients. So the best few axes are those of F^1/2 C F^1/2, with C the latents' covariance: a
    principal component analysis in which keys and values are balanced by what they are worth.

    Args:
      seen: sums over texts, as NumPy arrays.
      tokens: that were summed over; the sum of their weights is as much.
    """
    mean = np.asarray(seen.total, np.float64) / tokens
    covariance = np.asarray(seen.products, np.float64) / tokens - np.outer(mean, mean)
    fisher = np.asarray(seen.slopes, np.float64) / tokens
    ridge = _RIDGE * np.trace(fisher) / len(fisher) + 1e-300
    values, vectors = np.linalg.eigh(fisher + ridge * np.eye(len(fisher)))
    values = np.sqrt(np.maximum(values, ridge))
    root = (vectors * values) @ vectors.T
    inverse = (vectors / values) @ vectors.T
    costs, axes = np.linalg.eigh(root @ covariance @ root)
    costs, axes = np.maximum(costs[::-1], 0.0) / 2, axes[:, ::-1]
    return Axes(mean, axes.T @ root, inverse @ axes, costs)


def compressed(checkpoint: Checkpoint, axes: list[Axes], ranks: list[int]) -> Checkpoint:
    """The same model with latents along the first axes only, their means taken out.

    Args:
      checkpoint: of a model with latents, without their norms.
      axes: one a layer.
      ranks: axes that are left of each layer.
    """
    weights = {name: np.asarray(value) for name, value in checkpoint.weights.items()}
    layers = list(checkpoint.config.layers)
    for index, (of_layer, rank) in enumerate(zip(axes, ranks, strict=True)):
        name = f"layers.{index}.attention"
        down, up = of_layer.down[:rank], of_layer.up[:, :rank]

        old = len(of_layer.mean)
        whole, bias, k_up, v_up, v_bias = (
            np.asarray(weights[f"{name}.{part}"], np.float64)
            for part in (
                "kv_down.weight",
                "kv_down.bias",
                "k_up.weight",
                "v_up.weight",
                "v_up.bias",
            )
        )
        # Rows as long as they were on average: learning moves all by steps of one size.
        lengths = np.linalg.norm(down @ whole[:old], axis=1)
        stretch = np.linalg.norm(whole[:old], axis=1).mean() / np.maximum(lengths, 1e-30)
        down, up = down * stretch[:, None], up / stretch[None, :]
        moved = {
            "kv_down.weight": np.concatenate([down @ whole[:old], whole[old:]]),
            "kv_down.bias": np.concatenate([down @ (bias[:old] - of_layer.mean), bias[old:]]),
            "k_up.weight": k_up @ up,
            "v_up.weight": v_up @ up,
            "v_up.bias": v_bias + v_up @ of_layer.mean,
        }
        weights |= {f"{name}.{part}": x.astype(np.float32) for part, x in moved.items()}
        latent = layers[index].latent
        assert latent is not None
        layers[index] = dataclasses.replace(
            layers[index], latent=dataclasses.replace(latent, rank=rank)
        )
    config = dataclasses.replace(checkpoint.config, layers=tuple(layers))
    return Checkpoint(config, weights, checkpoint.tokenizer, checkpoint.source)
