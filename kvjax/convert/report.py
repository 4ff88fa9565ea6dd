"""A conversion from beginning to end, with what it kept and what it cost."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from kvjax.convert.heal import Healed, Healing, heal
from kvjax.convert.healing_files import HealingFiles
from kvjax.convert.judge import Judgement, final_states, judged
from kvjax.convert.mla import MEASURED_TOKENS, Converted, LayerReport, convert_mla
from kvjax.convert.pairs import Pairs
from kvjax.convert.texts import Texts
from kvjax.decode.calls import Progress
from kvjax.model import Model, from_checkpoint
from kvjax.models import Checkpoint

LARGE_LOSS = 1.1
"""Times the original's perplexity, above which a report says that too little was kept."""


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What became of a model.

    Attributes:
      checkpoint: the converted model.
      layers: what each layer kept.
      bytes_before: of a token's keys and values, in all layers, in the original's dtype.
      bytes_after: of its latents and rotated parts, in the same dtype.
      learnt_tokens: that were measured, and learnt from.
      converted: what conversion alone gave, on text that was not learnt from.
      healed: the same after healing; None if there was none.
      losses: of each step of healing.
      files: what healing kept on the way, to `drop` once the model is written; None if there was
        no healing.
    """

    checkpoint: Checkpoint
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    learnt_tokens: int
    converted: Judgement
    healed: Judgement | None
    losses: tuple[float, ...]
    files: HealingFiles | None

    @property
    def final(self) -> Judgement:
        """Of the model as it is."""
        return self.converted if self.healed is None else self.healed

    @property
    def verdict(self) -> str | None:
        """What to say of a loss that is large; None of one that is not."""
        ratio = self.final.ratio
        if ratio <= LARGE_LOSS:
            return None
        if self.healed is None:
            advice = "keep more, or heal it"
        else:
            advice = "keep more, or heal it for longer"
        return (
            f"the perplexity is {ratio:.2f} times the original's: {self.bytes_after} bytes a token "
            f"hold too little of this model's {self.bytes_before}, which have no structure of so "
            f"low a rank; {advice}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the weights."""
        judgements = {
            name: None if one is None else dataclasses.asdict(one) | {"ratio": one.ratio}
            for name, one in (("converted", self.converted), ("healed", self.healed))
        }
        return {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "learnt_tokens": self.learnt_tokens,
            **judgements,
            "verdict": self.verdict,
            "losses": list(self.losses),
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }


def convert_and_judge(
    model: Model,
    texts: Texts,
    *,
    rank: int,
    rope_dim: int,
    tokens: int = MEASURED_TOKENS,
    even: bool = False,
    seed: int = 0,
    pairs: Sequence[Pairs] | None = None,
    healing: Healing | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    healing_progress: Callable[[int, float], None] | None = None,
) -> Report:
    """Convert a model, judge it on text that it has not learnt from, heal it, and judge it again.

    Args:
      model: the original.
      texts: of `split_texts`.
      rank: see `convert_mla`.
      rope_dim: see `convert_mla`.
      tokens: see `convert_mla`.
      even: see `convert_mla`.
      seed: see `convert_mla`.
      pairs: see `convert_mla`.
      healing: how; None leaves it as it was converted.
      folder: see `heal`.
      progress: called with "convert" or "judge", and how much of it is done.
      healing_progress: see `heal`.

    Raises:
      KvjaxError: as `convert_mla` and `heal` do.
    """
    report = progress or (lambda phase, share: None)
    made: Converted = convert_mla(
        model,
        texts.learnt,
        rank=rank,
        rope_dim=rope_dim,
        tokens=tokens,
        even=even,
        seed=seed,
        pairs=pairs,
        progress=progress,
    )
    report("judge", 0.0)
    states = final_states(model, texts.held_out)
    checkpoint = made.checkpoint
    losses: tuple[float, ...] = ()
    files: HealingFiles | None = None
    first, spec = _judged(model, checkpoint, texts, states), model.spec
    report("judge", 1.0)
    second = None
    if healing is not None:
        healed: Healed = heal(
            model, checkpoint, texts.learnt, healing, folder=folder, progress=healing_progress
        )
        checkpoint, losses, files = healed.checkpoint, healed.losses, healed.files
        second = _judged(model, checkpoint, texts, states)
    elements = sum(layer.rank + layer.rope_dim for layer in made.layers)
    return Report(
        checkpoint=checkpoint,
        layers=made.layers,
        bytes_before=spec.bytes_per_token,
        bytes_after=elements * spec.bytes_per_element,
        learnt_tokens=texts.learnt.size,
        converted=first,
        healed=second,
        losses=losses,
        files=files,
    )


def _judged(
    model: Model, checkpoint: Checkpoint, texts: Texts, states: Float32[np.ndarray, "m W d"]
) -> Judgement:
    other = from_checkpoint(checkpoint, name="converted", dtype=model.dtype)
    return judged(model, other, texts.held_out, states=states)
