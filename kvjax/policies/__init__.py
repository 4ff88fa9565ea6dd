"""What is kept, read and placed: page sketches, and the rules that choose pages by them."""

from kvjax.policies.by_token import TokenChoice, chunk_pages, heavy_hitters, impress
from kvjax.policies.low_bit import ExactKeys, LowBitKeys
from kvjax.policies.select import Choice, select
from kvjax.policies.sketch import MeanKeys, QuestBounds, Sketch

__all__ = [
    "Choice",
    "ExactKeys",
    "LowBitKeys",
    "MeanKeys",
    "QuestBounds",
    "Sketch",
    "TokenChoice",
    "chunk_pages",
    "heavy_hitters",
    "impress",
    "select",
]
