"""DeepSeekMoE: experts that all tokens share, and experts that each token chooses."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.models.config import Activation
from kvjax.models.deepseek import Experts
from kvjax.models.linear import activate, project
from kvjax.models.mlp import MLP

_MOST_ROWS = 128  # of one product: as many as a TPU multiplies at once


class Router(nnx.Module):
    """Which experts a token goes through, and how much of each it gets; all in float32."""

    def __init__(self, size: int, experts: Experts) -> None:
        self.experts = experts
        self.weight = nnx.Param(jnp.zeros((experts.count, size), jnp.float32))
        biased = experts.routing == "noaux_tc"
        self.bias = nnx.Param(jnp.zeros((experts.count,), jnp.float32)) if biased else None

    def __call__(
        self, x: Float32[Array, "T d"]
    ) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"]]:
        """Every token's experts, no two of them the same, and their weights."""
        logits = project(x, self.weight[...])
        softmax = self.experts.scores == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        rank = scores if self.bias is None else scores + self.bias[...][None, :]
        if self.experts.groups > 1:
            rank = jnp.where(self._eligible(rank), rank, -jnp.inf)
        chosen = lax.top_k(rank, self.experts.chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.experts.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * self.experts.scale

    def _eligible(self, rank: Float32[Array, "T E"]) -> Bool[Array, "T E"]:
        """Whether an expert is in one of its token's best groups."""
        groups = self.experts.groups
        members = rank.reshape(rank.shape[0], groups, -1)
        best = lax.top_k(members, 1 if self.bias is None else 2)[0].sum(axis=-1)
        chosen = lax.top_k(best, self.experts.chosen_groups)[1]
        among = (chosen[:, :, None] == jnp.arange(groups, dtype=jnp.int32)[None, None]).any(axis=1)
        return jnp.repeat(among, members.shape[-1], axis=-1)


class RoutedExperts(nnx.Module):
    """The experts that are chosen from: E gated MLPs, their weights stacked [E, out, in]."""

    def __init__(
        self, size: int, experts: Experts, activation: Activation, dtype: DTypeLike
    ) -> None:
        count, wide = experts.count, experts.size
        self.gate = nnx.Param(jnp.zeros((count, wide, size), dtype))
        self.up = nnx.Param(jnp.zeros((count, wide, size), dtype))
        self.down = nnx.Param(jnp.zeros((count, size, wide), dtype))
        self.activation = activation

    def __call__(
        self,
        x: Float32[Array, "T d"],
        chosen: Int32[Array, "T K"],
        weights: Float32[Array, "T K"],
    ) -> Float32[Array, "T d"]:
        """The weighted sum of every token's experts, as `Router` chose them.

        Tokens are sorted by expert and multiplied in blocks that have one expert each: a block
        reads only that expert's weights, no token is dropped, and what blocks are padded with is at
        most as much as there is. (XLA's `ragged_dot` multiplies every token by every expert on a
        CPU.)
        """
        stacks = (self.gate[...], self.up[...], self.down[...])
        blocks = _blocks(chosen, stacks[0].shape[0])

        def add(
            out: Float32[Array, "T d"], block: tuple[Array, Array]
        ) -> tuple[Float32[Array, "T d"], None]:
            expert, slots = block
            tokens = slots // chosen.shape[1]  # T, out of bounds, where the block is padded
            rows = x.at[tokens].get(mode="fill", fill_value=0)
            # The stacks must be seen to depend on the block: XLA converts whole bfloat16 stacks to
            # float32 before the loop on a CPU if they do not.
            (gate, up, down), expert = lax.optimization_barrier((stacks, expert))
            hidden = activate(self.activation, project(rows, gate[expert]))
            rows = project(hidden * project(rows, up[expert]), down[expert])
            share = weights.reshape(-1).at[slots].get(mode="fill", fill_value=0)
            return out.at[tokens].add(rows * share[:, None], mode="drop"), None

        return lax.scan(add, jnp.zeros_like(x), blocks)[0]


def _blocks(
    chosen: Int32[Array, "T K"], count: int
) -> tuple[Int32[Array, " N"], Int32[Array, "N R"]]:
    """Blocks of slots with one expert: a slot is one of a token's K, and T * K is none.

    N is the most that any choice needs; where one needs less, the last blocks are empty.
    """
    slots = chosen.size
    rows = min(1 << max((slots // count).bit_length() - 1, 0), _MOST_ROWS)
    most = min(slots, slots // rows + count)
    flat = chosen.reshape(-1)
    by_expert = jnp.argsort(flat).astype(jnp.int32)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    needed = -(-sizes // rows)
    ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(needed)
    block, row = jnp.arange(most, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    before = jnp.sum(block[:, None] >= block_ends[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(before, count - 1)
    first = (ends - sizes)[expert] + (block - (block_ends - needed)[expert]) * rows
    places = first[:, None] + row[None, :]
    inside = places < ends[expert][:, None]
    return expert, jnp.where(inside, by_expert.at[places].get(mode="clip"), slots)


class ExpertsMLP(nnx.Module):
    """The MLP of a layer that has experts: routed ones, and shared ones, stored as one MLP."""

    def __init__(
        self, size: int, experts: Experts, activation: Activation, dtype: DTypeLike
    ) -> None:
        self.router = Router(size, experts)
        self.experts = RoutedExperts(size, experts, activation, dtype)
        wide = experts.shared_size
        self.shared = MLP(size, wide, activation, dtype) if wide else None

    def __call__(self, x: Float32[Array, "T d"]) -> Float32[Array, "T d"]:
        """Maps every token on its own."""
        out = self.experts(x, *self.router(x))
        return out if self.shared is None else out + self.shared(x)
