"""Models made into others: keys and values into latents."""

from kvjax.convert.folder import save_folder
from kvjax.convert.heal import Healed, Healing, heal
from kvjax.convert.judge import Judgement, judged
from kvjax.convert.mla import Converted, LayerReport, convert_mla
from kvjax.convert.report import Report, convert_and_judge
from kvjax.convert.texts import Texts, split_texts

__all__ = [
    "Converted",
    "Healed",
    "Healing",
    "Judgement",
    "LayerReport",
    "Report",
    "Texts",
    "convert_and_judge",
    "convert_mla",
    "heal",
    "judged",
    "save_folder",
    "split_texts",
]
