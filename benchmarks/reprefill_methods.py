"""The ways of answering from a stored prefix that are compared."""

from kvjax.decode import PrefixConfig

OURS = "3-bit keys, per head"
CONTIGUOUS = "ContiguousKV"
IMPRESS = "IMPRESS"
H2O = "H2O, 64-token chunks, LFU"
FULL = "full load (AttentionStore), LRU"
MAPPED = "mapped layers (FlexGen)"
RECOMPUTE = "recompute"

MAIN: dict[str, PrefixConfig] = {
    OURS: PrefixConfig(by="low-bit", bits=3),
    CONTIGUOUS: PrefixConfig(by="keys", who="period", placement="attention", pooling=0),
    IMPRESS: PrefixConfig(
        by="impress", who="layer", placement="impress", prefetch=False, reorder=True
    ),
    "IMPRESS, not reordered": PrefixConfig(
        by="impress", who="layer", placement="impress", prefetch=False
    ),
    H2O: PrefixConfig(by="h2o", who="layer", placement="lfu", prefetch=False),
    FULL: PrefixConfig(by="all", who="layer", placement="lru"),
    MAPPED: PrefixConfig(by="all", who="layer", placement="lru", prefetch=False),
}
"""Ours and what it claims to beat: at every context, timed."""

GRID: dict[str, PrefixConfig] = {
    "3-bit keys, per head, not pooled": PrefixConfig(by="low-bit", bits=3, pooling=0),
    "2-bit keys, per head": PrefixConfig(by="low-bit", bits=2),
    "4-bit keys, per head": PrefixConfig(by="low-bit", bits=4),
    "page means, per head": PrefixConfig(by="mean"),
    "Quest bounds, per head": PrefixConfig(by="quest"),
    "exact keys, per head": PrefixConfig(by="keys"),
    "3-bit keys, per layer": PrefixConfig(by="low-bit", bits=3, who="layer"),
    "2-bit keys, per layer": PrefixConfig(by="low-bit", bits=2, who="layer"),
    "4-bit keys, per layer": PrefixConfig(by="low-bit", bits=4, who="layer"),
    "page means, per layer": PrefixConfig(by="mean", who="layer"),
    "Quest bounds, per layer": PrefixConfig(by="quest", who="layer"),
    "exact keys, per layer": PrefixConfig(by="keys", who="layer"),
    "3-bit keys, per period": PrefixConfig(by="low-bit", bits=3, who="period"),
    "2-bit keys, per period": PrefixConfig(by="low-bit", bits=2, who="period"),
    "4-bit keys, per period": PrefixConfig(by="low-bit", bits=4, who="period"),
    "page means, per period": PrefixConfig(by="mean", who="period"),
    "Quest bounds, per period": PrefixConfig(by="quest", who="period"),
}
"""Who decides and by what: bytes and quality, at one context. The two that are missing are `MAIN`'s
`OURS` (3-bit keys, per head) and `CONTIGUOUS` (exact keys, per period)."""

METHODS = MAIN | GRID

WHOLE = (FULL, MAPPED)
"""Methods that read everything whatever the budget."""
