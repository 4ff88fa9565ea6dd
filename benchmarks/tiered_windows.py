"""Windows planned on one question for the tiered decode benchmark, at the memory of equal ones."""

from collections.abc import Callable

from benchmarks.needles import document
from benchmarks.tiered_measure import QUESTION, STEPS
from kvjax.config import CacheConfig
from kvjax.decode import plan_windows, profile_windows
from kvjax.decode.tiered_layers import selecting
from kvjax.decode.tiered_plan import tiered_plan
from kvjax.model import Model
from kvjax.policies import WindowPlan


def planned(
    model: Model, cache: CacheConfig, tokens: int, seed: int, say: Callable[[str], None]
) -> WindowPlan:
    """Slots for every layer and KV head, as many together as equal windows have.

    What is profiled is a question about a document of the same length with a code of its own, so
    that every question of the benchmark is measured with a plan that has not seen it.

    Args:
      model: what runs.
      cache: with equal windows.
      tokens: of the document.
      seed: of the benchmark's document; the profiled one has the next.
      say: told what goes on.
    """
    assert model.tokenizer is not None
    new = QUESTION + STEPS + 1  # as the benchmark has
    equal = tiered_plan(model, [tokens], new, cache)[0]
    slots = sum(map(sum, equal.slots))
    memory = (
        slots * selecting(model.spec).bytes_per_page(cache.page_size) // sum(map(len, equal.slots))
    )
    ids, (needle,) = document(model.tokenizer, tokens - QUESTION, 1, seed + 1)
    ids = ids + model.tokenizer.encode(needle.question, add_bos=False)

    def progress(_: str, share: float) -> None:
        say(f"profiled {share:.0%} of the windows")

    profile = profile_windows(model, ids, cache, new_tokens=new, progress=progress)
    return plan_windows(profile, model, cache, device_bytes=memory)
