"""What DeepSeek's models have that others do not: static facts, parts of a `ModelConfig`."""

import dataclasses
import math
from typing import Literal

Scores = Literal["softmax", "sigmoid"]
Routing = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclasses.dataclass(frozen=True)
class Latent:
    """Keys and values of all heads are made from one latent (MLA, arXiv:2405.04434, section 2.1).

    A head's key is its own part, made from the latent and not rotated, and after it `rope_dim`
    rotated elements that all heads share. Queries are laid out alike.
    """

    rank: int  # elements of the latent
    rope_dim: int  # rotated elements, the last of a query's and a key's head_dim
    value_dim: int  # elements of one head's value
    query_rank: int | None = None  # elements of the queries' latent; None: they have none
    interleaved: bool = True  # rotated pairs are projected as (2i, 2i + 1), not (i, i + half)
    normalized: bool = True  # latents pass an RMSNorm; those of converted models do not
    biases: bool = False  # of queries, of what goes down to latents, and of values

    def __post_init__(self) -> None:
        for name in ("rank", "rope_dim", "value_dim", "query_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"latent: {name}={value} must be at least 1")
        if self.rope_dim % 2:
            raise ValueError(f"latent: rope_dim={self.rope_dim} must be even: RoPE turns pairs")
        if self.biases and self.query_rank is not None:
            raise ValueError(
                f"latent: query_rank={self.query_rank} must be None: queries with biases have no "
                "latent"
            )


@dataclasses.dataclass(frozen=True)
class Experts:
    """MLPs of which a token goes through a few, its own choice (DeepSeekMoE, arXiv:2401.06066).

    `greedy` takes the experts with the best scores. `group_limited_greedy` takes them from the
    groups whose best score is highest (arXiv:2405.04434, section 2.2.2). `noaux_tc` adds a learned
    bias to what it compares, not to what it weighs by, and ranks groups by the sum of their two
    best (arXiv:2412.19437, section 2.1.2).
    """

    layers: tuple[int, ...]  # those with experts; every other layer has one MLP
    count: int  # experts to choose from
    chosen: int  # experts a token goes through
    size: int  # hidden elements of one expert
    shared_size: int = 0  # hidden elements of an MLP that all tokens go through; 0: there is none
    scores: Scores = "softmax"
    routing: Routing = "greedy"
    groups: int = 1  # equal parts that the experts are in
    chosen_groups: int = 1  # groups a token's experts may be in
    normalize: bool = False  # a token's weights are divided by their sum
    scale: float = 1.0  # and then multiplied by this

    def __post_init__(self) -> None:
        for name in ("count", "chosen", "size", "groups", "chosen_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"experts: {name}={getattr(self, name)} must be at least 1")
        if self.shared_size < 0:
            raise ValueError(f"experts: shared_size={self.shared_size} must be at least 0")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(
                f"experts: scores={self.scores!r} is not known: softmax and sigmoid are"
            )
        if self.routing not in ("greedy", "group_limited_greedy", "noaux_tc"):
            raise ValueError(
                f"experts: routing={self.routing!r} is not known: greedy, group_limited_greedy and "
                "noaux_tc are"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"experts: scale={self.scale} must be a positive number")
        self._check_groups()

    def _check_groups(self) -> None:
        count, groups = self.count, self.groups
        if groups > 1 and self.routing == "greedy":
            raise ValueError(f"experts: groups={groups} must be 1: greedy routing knows no groups")
        if count % groups:
            raise ValueError(f"experts: count={count} must be a multiple of groups={groups}")
        if self.chosen_groups > groups:
            raise ValueError(
                f"experts: chosen_groups={self.chosen_groups} is above groups={groups}"
            )
        if groups > 1 and self.routing == "noaux_tc" and count < 2 * groups:
            raise ValueError(
                f"experts: groups={groups} must be at most half of count={count}: noaux_tc ranks a "
                "group by two experts"
            )
        eligible = self.chosen_groups * (count // groups)
        if self.chosen > eligible:
            raise ValueError(
                f"experts: chosen={self.chosen} is above the {eligible} a token may choose from"
            )
