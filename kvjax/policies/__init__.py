"""What is kept, read and placed: page sketches, rules that choose pages by them, and windows."""

from kvjax.policies.by_token import TokensInChunks, chunk_pages, heavy_hitters, impress
from kvjax.policies.clusters import Clustering
from kvjax.policies.hierarchical import Hierarchical
from kvjax.policies.index import EstimatingIndex, PageIndex, PerPage
from kvjax.policies.indexer import DistilledIndexer
from kvjax.policies.lightning_indexer import LayerIndexer
from kvjax.policies.low_bit import ExactKeys, LowBitKeys
from kvjax.policies.low_rank import LowRank
from kvjax.policies.magicpig import MagicPIG
from kvjax.policies.pqcache import PQCache
from kvjax.policies.retroinfer import RetroInfer
from kvjax.policies.select import Choice, select
from kvjax.policies.sketch import MeanKeys, QuestBounds, Sketch
from kvjax.policies.tiering import Place, Select, Window
from kvjax.policies.window_plan import WindowPlan
from kvjax.policies.window_scaling import TrafficProfile, exact_windows, greedy_windows

__all__ = [
    "Choice",
    "Clustering",
    "DistilledIndexer",
    "EstimatingIndex",
    "ExactKeys",
    "Hierarchical",
    "LayerIndexer",
    "LowBitKeys",
    "LowRank",
    "MagicPIG",
    "MeanKeys",
    "PQCache",
    "PageIndex",
    "PerPage",
    "Place",
    "QuestBounds",
    "RetroInfer",
    "Select",
    "Sketch",
    "TokensInChunks",
    "TrafficProfile",
    "Window",
    "WindowPlan",
    "chunk_pages",
    "exact_windows",
    "greedy_windows",
    "heavy_hitters",
    "impress",
    "select",
]
