"""The baseline that decodes over a prompt on disk: each step maps and reads one layer at a time.

FlexGen keeps whole tensors on disk in this way. Nothing is chosen, so that a step reads every byte.
"""

import dataclasses
import functools
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int32

from kvjax.cache import PagedKVCache
from kvjax.decode.step import DecodeState
from kvjax.models import Decoder, ModelConfig


class MappedPrompt:
    """Keys and values of a prompt in a flat file, a layer's after one another.

    What was read is dropped from the operating system's memory at once: every step reads the disk.
    """

    def __init__(self, path: pathlib.Path, cache: PagedKVCache, tokens: int) -> None:
        self.path, self.tokens = path, tokens
        pages = np.asarray(cache.block_tables[0])[: math.ceil(tokens / cache.page_size)]
        pools = list(zip(cache.k_pages, cache.v_pages, strict=True))
        _, heads, _, width = pools[0][0].shape
        self.shape = (2, tokens, heads, width)
        self.dtype = np.dtype(pools[0][0].dtype)
        with path.open("wb") as file:
            for layer in pools:
                for pool in layer:
                    rows = np.asarray(pool[pages]).swapaxes(1, 2).reshape(-1, heads, width)
                    file.write(np.ascontiguousarray(rows[:tokens]).tobytes())
            os.fsync(file.fileno())  # only what is on the disk can be dropped from memory

    @property
    def layer_bytes(self) -> int:
        """What a step reads for one layer."""
        return math.prod(self.shape) * self.dtype.itemsize

    def layer(self, index: int, _: Any = None) -> np.ndarray:
        """Keys and values [2, S, Hkv, D] of one layer, from the disk.

        Args:
          index: of the layer.
        """
        begin = index * self.layer_bytes
        mapped = np.memmap(self.path, np.uint8, "r", offset=begin, shape=(self.layer_bytes,))
        found = np.array(mapped).view(self.dtype).reshape(self.shape)
        del mapped  # a page that is mapped is not dropped
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), begin, self.layer_bytes, os.POSIX_FADV_DONTNEED)
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Newer:
    """What was decoded after the prompt, a layer each; it stays in memory."""

    keys: tuple[Float[Array, "R Hkv D"], ...]
    values: tuple[Float[Array, "R Hkv D"], ...]
    length: Int32[Array, ""]  # of R, how many tokens there are


def nothing_newer(prompt: MappedPrompt, layers: int, room: int) -> Newer:
    """Room for tokens after a prompt.

    Args:
      prompt: whose shapes they have.
      layers: of the model.
      room: R, tokens.
    """
    _, _, heads, width = prompt.shape
    empty = tuple(jnp.zeros((room, heads, width), prompt.dtype) for _ in range(layers))
    return Newer(empty, empty, jnp.int32(0))


def mapped_step(decoder: Decoder, prompt: MappedPrompt, state: DecodeState) -> DecodeState:
    """The state after the token that it says, whose layers read the prompt from the disk.

    Args:
      decoder: the model.
      prompt: what the step reads.
      state: of one row; its cache is what is `Newer`.
    """
    attend = functools.partial(_attend, decoder.config, prompt)
    position = (prompt.tokens + state.cache.length)[None]
    hidden, newer = decoder(state.tokens, position, attend, state.cache)
    newer = dataclasses.replace(newer, length=newer.length + 1)
    return dataclasses.replace(state, cache=newer, hidden=hidden)


def _attend(
    config: ModelConfig,
    prompt: MappedPrompt,
    layer: int,
    q: Float[Array, "1 Hq D"],
    k: Float[Array, "1 Hkv D"],
    v: Float[Array, "1 Hkv D"],
    newer: Newer,
) -> tuple[Array, Newer]:
    here, dtype = newer.length, newer.keys[layer].dtype
    keys = newer.keys[layer].at[here].set(k[0].astype(dtype))
    values = newer.values[layer].at[here].set(v[0].astype(dtype))
    # The length is not looked at: it makes every step's read another one.
    shape = jax.ShapeDtypeStruct(prompt.shape, prompt.dtype)
    old: Array = io_callback(functools.partial(prompt.layer, layer), shape, here)
    room, heads, width = keys.shape
    position = jnp.arange(prompt.tokens + room)
    age = prompt.tokens + here - position
    window = config.layers[layer].window
    seen = age >= 0 if window is None else (age >= 0) & (age < window)
    grouped = q[0].reshape(heads, -1, width).astype(jnp.float32)
    both = jnp.concatenate([old[0], keys]).astype(jnp.float32)
    scores = config.scale(layer) * jnp.einsum("hgd,shd->hgs", grouped, both)
    if config.attn_soft_cap is not None:
        scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    both = jnp.concatenate([old[1], values]).astype(jnp.float32)
    out = jnp.einsum("hgs,shd->hgd", weights, both).reshape(1, -1, width)
    newer = dataclasses.replace(
        newer,
        keys=(*newer.keys[:layer], keys, *newer.keys[layer + 1 :]),
        values=(*newer.values[:layer], values, *newer.values[layer + 1 :]),
    )
    return out, newer
