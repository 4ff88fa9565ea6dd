"""Models made into others: keys and values into latents."""

from kvjax.convert.folder import save_folder
from kvjax.convert.judge import Judgement, judged
from kvjax.convert.mla import Converted, LayerReport, convert_mla
from kvjax.convert.texts import Texts, split_texts

__all__ = [
    "Converted",
    "Judgement",
    "LayerReport",
    "Texts",
    "convert_mla",
    "judged",
    "save_folder",
    "split_texts",
]
