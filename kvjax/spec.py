"""What one token costs: the byte counts of a KV cache, layer by layer.

Every size in kvjax comes from a `KVSpec`. It is frozen and hashable, so it is static under `jit`.
Counts are exact integers in bytes, slots or tokens unless a name says otherwise; they are payload,
without block tables and without the padding a device adds to an array. Section numbers are those
of the survey whose formulas these are, "KV Cache 技术演进".

The example that all worked numbers use: 32 layers, 8 KV heads of 128, bfloat16.

>>> spec = KVSpec((LayerSpec.gqa(kv_heads=8, head_dim=128),) * 32)
>>> KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
>>> spec.bytes_per_token / KIB
128.0
>>> spec.bytes_per_sequence(8192) / GIB
1.0

With a KV head for each of 32 query heads it would be four times that; grouping takes a quarter.

>>> mha = KVSpec((LayerSpec.gqa(kv_heads=32, head_dim=128),) * 32)
>>> mha.bytes_per_sequence(8192) / GIB
4.0

Sixteen requests of 8K tokens, and the same with 2 KV heads, and as 576 latent elements (MLA):

>>> 16 * spec.bytes_per_sequence(8192) / GIB
16.0
>>> 16 * KVSpec((LayerSpec.gqa(2, 128),) * 32).bytes_per_sequence(8192) / GIB
4.0
>>> mla = KVSpec((LayerSpec.mla(latent_dim=512, rope_dim=64),) * 32)
>>> mla.bytes_per_token / KIB, 16 * mla.bytes_per_sequence(8192) / GIB
(36.0, 4.5)

An 8-bit float halves the payload:

>>> KVSpec(spec.layers, dtype="float8_e4m3fn").bytes_per_token / spec.bytes_per_token
0.5
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from kvjax.errors import check_integer

DEFAULT_PAGE_SIZE = 16
"""Tokens a page holds unless a configuration says otherwise."""

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of one stored element, for every dtype a pool may have."""

INDEX_FLOAT8, INDEX_FLOAT4 = "float8_e4m3fn", "float4_e2m1fn"
INDEX_BITS = {INDEX_FLOAT8: 8, INDEX_FLOAT4: 4}
"""What index keys may be stored in beside the spec's dtype, with a float32 scale a token."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer stores. Build it with `gqa`, `mla`, `retention` or `shared_with`.

    Attributes:
      kind: "gqa" (keys and values of `kv_heads` heads; MHA and MQA are its ends), "mla" (one
        latent and one rotated position key, DeepSeek-V2 section 2.1) or "retention" (nothing of a
        token, but a float32 matrix [head_dim, v_head_dim] a head and sequence: YOCO section 3.1).
      kv_heads: KV heads; 0 for "mla".
      head_dim: elements of one head's key; 0 for "mla".
      v_head_dim: elements of one head's value; None means `head_dim`, and is replaced by it.
      latent_dim: elements of the latent; 0 for "gqa".
      rope_dim: elements of the rotated position key; 0 for "gqa".
      window: tokens a query sees, itself included; None means all.
      index_dim: elements of the index key that tokens are chosen by (DSA); 0 stores none.
      top_tokens: most tokens that a query attends to, of those it sees; None means all.
      shared: the layer whose pages this one reads, storing nothing itself (YOCO); None means it
        stores its own.

    Raises:
      ValueError: a size is not what the kind needs.
    """

    kind: Literal["gqa", "mla", "retention"]
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int | None = None
    latent_dim: int = 0
    rope_dim: int = 0
    window: int | None = None
    shared: int | None = None
    index_dim: int = 0
    top_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("gqa", "mla", "retention"):
            raise ValueError(f"kind is {self.kind!r}: must be 'gqa', 'mla' or 'retention'")
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        if self.window is not None:
            check_integer("window", self.window, 1)
        if self.shared is not None:
            check_integer("shared", self.shared, 0)
            if not self.kv_heads + self.latent_dim:
                return  # its sizes are filled in by the KVSpec that knows the other layer
        heads: tuple[str, ...] = ("kv_heads", "head_dim", "v_head_dim")
        latent: tuple[str, ...] = ("latent_dim", "rope_dim", "index_dim")
        used, unused = (latent, heads) if self.kind == "mla" else (heads, latent)
        for name in used:
            # A latent without a position key (rope_dim=0) is a model that needs no positions.
            least = 0 if name in ("rope_dim", "index_dim") else 1
            check_integer(name, getattr(self, name), least)
        for name in unused:
            if getattr(self, name) != 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: a layer of kind {self.kind!r} has none; "
                    f"leave it out"
                )
        if self.kind == "retention" and (self.window is not None or self.shared is not None):
            raise ValueError(
                f"window is {self.window} and shared is {self.shared}: must be None, as a layer of "
                f"kind 'retention' keeps no tokens"
            )
        if self.top_tokens is not None:
            check_integer("top_tokens", self.top_tokens, 1)
        if (self.kind != "mla" and self.top_tokens is not None) or (
            self.index_dim and self.top_tokens is None
        ):
            raise ValueError(
                f"top_tokens is {self.top_tokens!r}: layers of kind 'mla' have it, and those with "
                f"index_dim={self.index_dim} need it"
            )

    @classmethod
    def gqa(
        cls, kv_heads: int, head_dim: int, v_head_dim: int | None = None, window: int | None = None
    ) -> "LayerSpec":
        """A layer that stores a key and a value for each of its KV heads.

        Args:
          kv_heads: KV heads, at least 1 (1 is MQA; as many as query heads is MHA).
          head_dim: elements of one key.
          v_head_dim: elements of one value; `head_dim` if None.
          window: tokens a query sees, itself included; all if None.
        """
        return cls("gqa", kv_heads, head_dim, v_head_dim, window=window)

    @classmethod
    def mla(
        cls,
        latent_dim: int,
        rope_dim: int,
        window: int | None = None,
        *,
        index_dim: int = 0,
        top_tokens: int | None = None,
    ) -> "LayerSpec":
        """A layer that stores one latent and one rotated position key (DeepSeek-V2, section 2.1).

        And, where a lightning indexer chooses what queries attend to, one index key
        (DeepSeek-V3.2-Exp, section 2.1).

        Args:
          latent_dim: elements of the latent that keys and values are projected from.
          rope_dim: elements of the position key that all heads share.
          window: tokens a query sees, itself included; all if None.
          index_dim: elements of the index key; 0 where the layer has no indexer of its own.
          top_tokens: most tokens that a query attends to; all if None.
        """
        return cls(
            "mla",
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            window=window,
            index_dim=index_dim,
            top_tokens=top_tokens,
        )

    @classmethod
    def retention(cls, heads: int, head_dim: int, v_head_dim: int | None = None) -> "LayerSpec":
        """A layer that keeps a state of each sequence, and nothing of its tokens.

        Args:
          heads: matrices of a sequence, at least 1.
          head_dim: rows of one, elements of a key.
          v_head_dim: columns of one, elements of a value; `head_dim` if None.
        """
        return cls("retention", heads, head_dim, v_head_dim)

    @classmethod
    def shared_with(cls, layer: int) -> "LayerSpec":
        """A layer that reads an earlier layer's pages and stores nothing (YOCO).

        Args:
          layer: index of the layer that stores; kind, sizes and window are taken from it when a
            `KVSpec` is made.
        """
        return cls("gqa", shared=layer)

    @property
    def value_dim(self) -> int:
        """Elements of one head's value: `v_head_dim`, or `head_dim` where that was None."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def pool_dims(self) -> tuple[int, int, int]:
        """KV heads, and elements of a key and of a value, as pages hold them.

        Pages of latents have one head: its key is the rotated position key, its value the latent.
        """
        if self.kind == "mla":
            return 1, self.rope_dim, self.latent_dim
        return self.kv_heads, self.head_dim, self.value_dim

    @property
    def elements_read_per_token(self) -> int:
        """Elements attention reads of one visible token, wherever they are stored."""
        if self.kind == "retention":
            return 0
        heads, key, value = self.pool_dims
        return heads * (key + value)

    @property
    def elements_per_token(self) -> int:
        """Elements this layer stores of one token: none if it reads another layer's pages."""
        return 0 if self.shared is not None else self.elements_read_per_token

    @property
    def state_elements(self) -> int:
        """Elements of a sequence's state, which is float32 and does not grow with its tokens."""
        return self.kv_heads * self.head_dim * self.value_dim if self.kind == "retention" else 0

    def visible_tokens(self, tokens: int) -> int:
        """How many of `tokens` cached tokens the newest one sees.

        Args:
          tokens: cached tokens, the newest included.
        """
        check_integer("tokens", tokens, 0)
        return tokens if self.window is None else min(tokens, self.window)

    def first_page(self, tokens: int, page_size: int) -> int:
        """The first page that the newest token sees a slot of; all pages before it are dead.

        Args:
          tokens: cached tokens, the newest included.
          page_size: tokens a page holds.
        """
        check_integer("page_size", page_size, 1)
        return (tokens - self.visible_tokens(tokens)) // page_size


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """A model's KV cache: one `LayerSpec` a layer, and the dtype they are stored in.

    Hashable, so it is a static argument under `jit`. A layer made by `LayerSpec.shared_with(j)`
    takes kind, sizes and window of layer j, and keeps `shared=j`:

    >>> spec = KVSpec((LayerSpec.gqa(2, 64), LayerSpec.shared_with(0)), dtype="float32")
    >>> spec.layers[1].kv_heads, spec.layers[1].elements_per_token
    (2, 0)
    >>> spec.bytes_per_token, spec.bytes_read_per_step(1)
    (1024, 2048)

    Attributes:
      layers: one entry a layer, in the order in which the model runs them.
      dtype: name of the stored elements' dtype, one of `ITEM_BYTES`.
      index_dtype: of index keys, if not `dtype`: one of `INDEX_BITS`, with a float32 scale a token.

    Raises:
      ValueError: no layers, none that stores tokens, an unknown dtype, or a shared layer that
        points to a layer which is not earlier, which stores no tokens, or whose sizes differ.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "bfloat16"
    index_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: must be one of {', '.join(ITEM_BYTES)}")
        if self.index_dtype is not None and self.index_dtype not in INDEX_BITS:
            raise ValueError(
                f"index_dtype is {self.index_dtype!r}: must be one of {', '.join(INDEX_BITS)}, or "
                f"None"
            )
        if not self.layers or not all(isinstance(layer, LayerSpec) for layer in self.layers):
            raise ValueError(
                f"layers is {self.layers!r}: must be one LayerSpec a layer, at least 1"
            )
        layers = tuple(self.layers)
        for index, layer in enumerate(layers):
            if layer.shared is None:
                continue
            where = f"layers[{index}].shared is {layer.shared}"
            if layer.shared >= index:
                allowed = f"0 to {index - 1}" if index else "but the first has none before it"
                raise ValueError(f"{where}: must name an earlier layer, {allowed}")
            stored = layers[layer.shared]
            if stored.kind == "retention":
                raise ValueError(f"{where}, a layer that keeps a state: name one that keeps tokens")
            if stored.shared is not None:
                raise ValueError(
                    f"{where}, a layer that stores nothing: name layer {stored.shared}, whose "
                    f"pages it reads"
                )
            resolved = dataclasses.replace(stored, shared=layer.shared)
            if layer not in (resolved, LayerSpec.shared_with(layer.shared)):
                raise ValueError(
                    f"{where}, but its sizes are not that layer's ({layer} against {stored}): "
                    f"build it with LayerSpec.shared_with({layer.shared})"
                )
            layers = (*layers[:index], resolved, *layers[index + 1 :])
        if not any(layer.elements_per_token for layer in layers):
            raise ValueError("layers keep states only: at least one must store tokens, in pages")
        object.__setattr__(self, "layers", layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states, over all layers, whatever its length.

        >>> yoco = KVSpec((LayerSpec.retention(24, 128), LayerSpec.gqa(8, 128)))
        >>> yoco.state_bytes, yoco.bytes_per_token
        (1572864, 4096)
        """
        return ITEM_BYTES["float32"] * sum(layer.state_elements for layer in self.layers)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one stored element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token adds, over all layers: 2 x layers x KV heads x head_dim x bytes."""
        return sum(map(self.layer_bytes_per_token, self.layers))

    def layer_bytes_per_token(self, layer: LayerSpec) -> int:
        """Bytes one token adds in one layer: keys and values, or a latent, and an index key.

        Args:
          layer: one of the spec's.
        """
        return self.bytes_per_element * layer.elements_per_token + self.index_bytes_per_token(layer)

    def index_bytes_per_token(self, layer: LayerSpec) -> int:
        """Bytes of one token's index key in one layer, its scale included.

        Args:
          layer: one of the spec's.

        >>> sparse = LayerSpec.mla(512, 64, index_dim=128, top_tokens=2048)
        >>> [KVSpec((sparse,), index_dtype=i).bytes_per_token for i in (None, *INDEX_BITS)]
        [1408, 1284, 1220]
        """
        if layer.shared is not None or not layer.index_dim:
            return 0
        if self.index_dtype is not None:
            bits = layer.index_dim * INDEX_BITS[self.index_dtype]
            return -(-bits // 8) + ITEM_BYTES["float32"]
        return layer.index_dim * self.bytes_per_element

    def source(self, layer: int) -> int:
        """The index of the layer whose pages `layer` reads: its own, unless it is shared."""
        check_integer("layer", layer, 0)
        if layer >= len(self.layers):
            raise ValueError(f"layer is {layer}: must be 0 to {len(self.layers) - 1}")
        shared = self.layers[layer].shared
        return layer if shared is None else shared

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of one page in every layer that stores.

        Args:
          page_size: tokens a page holds.

        >>> KVSpec((LayerSpec.gqa(8, 128),) * 32).bytes_per_page(16) / 2**20
        2.0
        """
        check_integer("page_size", page_size, 1)
        return self.bytes_per_token * page_size

    def bytes_per_sequence(self, tokens: int, page_size: int = 1) -> int:
        """Bytes that must be resident to decode a sequence's next token: whole pages, and states.

        A window layer needs only the pages its window touches, so it stops growing. A pool whose
        layers share one block table cannot give those layers' dead pages back: it holds
        `pages_for(tokens, page_size) * bytes_per_page(page_size)`.

        Args:
          tokens: cached tokens.
          page_size: tokens a page holds; 1 counts the payload alone.

        >>> both = KVSpec((LayerSpec.gqa(1, 256), LayerSpec.gqa(1, 256, window=512)))
        >>> [both.bytes_per_sequence(tokens, 16) // 2**10 for tokens in (512, 1024, 1025)]
        [1024, 1536, 1568]
        """
        check_integer("tokens", tokens, 0)
        return self.bytes_shared_prefix(0, (tokens,), page_size)

    def bytes_read_per_step(self, tokens: int) -> int:
        """Bytes one decode step must read of one sequence, each element once.

        A window layer reads its window; a shared layer reads the other layer's pages again,
        although nothing is stored for it twice. A layer that chooses tokens reads the index keys of
        all and the latents of the chosen. There it is a lower bound: where whole pages are read,
        they hold more latents (`pages_of_tokens` counts them), and a step reads index keys as soon
        as a sequence's pages have room for more tokens than are chosen, though it has no more yet.
        A state is read whole.

        Args:
          tokens: cached tokens, the newest included.

        DeepSeek-V3.2's layer at 32k tokens against V3's, which attends to all:

        >>> dense = KVSpec((LayerSpec.mla(512, 64),)).bytes_read_per_step(32768)
        >>> layers = (LayerSpec.mla(512, 64, index_dim=128, top_tokens=2048),)
        >>> for index_dtype in (None, *INDEX_BITS):
        ...     sparse = KVSpec(layers, index_dtype=index_dtype).bytes_read_per_step(32768)
        ...     print(f"{sparse / dense:.3f}")
        0.285
        0.177
        0.122
        """
        total = self.state_bytes if tokens else 0
        for layer in self.layers:
            seen = layer.visible_tokens(tokens)
            attended = seen if layer.top_tokens is None else min(seen, layer.top_tokens)
            total += attended * layer.elements_read_per_token * self.bytes_per_element
            # A choice of all is none: nothing is scored for it.
            total += seen * self.index_bytes_per_token(layer) if attended < seen else 0
        return total

    def step_read_seconds(self, tokens: int, bytes_per_second: float) -> float:
        """Seconds one decode step needs to read one sequence's cache once.

        Args:
          tokens: cached tokens, the newest included.
          bytes_per_second: bandwidth that the path really reaches.

        >>> spec = KVSpec((LayerSpec.gqa(8, 128),) * 32)
        >>> f"{spec.step_read_seconds(8192, 2**40) * 1000:.2f} ms"
        '0.98 ms'
        """
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second!r}: must be above 0")
        return self.bytes_read_per_step(tokens) / bytes_per_second

    def bytes_shared_prefix(self, prefix: int, suffixes: Sequence[int], page_size: int = 1) -> int:
        """Bytes that sequences with one common prefix need if it is stored once (section 10.4).

        Full pages of the prefix are shared; its open tail page, if any, is copied by every
        sequence that writes on. A window layer keeps the prefix's pages that some window touches,
        and a layer with a state has one for every sequence.

        Args:
          prefix: tokens that all sequences have in common.
          suffixes: tokens that each sequence adds of its own.
          page_size: tokens a page holds; 1 counts the payload alone.

        Two requests with 6K in common and 2K of their own, apart and with the prefix stored once:

        >>> spec = KVSpec((LayerSpec.gqa(8, 128),) * 32)
        >>> 2 * spec.bytes_per_sequence(8192) / 2**30
        2.0
        >>> spec.bytes_shared_prefix(6144, [2048, 2048]) / 2**30
        1.25
        """
        check_integer("prefix", prefix, 0)
        check_integer("page_size", page_size, 1)
        for suffix in suffixes:
            check_integer("suffixes", suffix, 0)
        shared_pages = prefix // page_size
        total = self.state_bytes * sum(prefix + suffix > 0 for suffix in suffixes)
        for layer in self.layers:
            oldest, pages = shared_pages, 0
            for suffix in suffixes:
                first = layer.first_page(prefix + suffix, page_size)
                oldest = min(oldest, first)
                pages += pages_for(prefix + suffix, page_size) - max(first, shared_pages)
            pages += shared_pages - oldest
            total += pages * page_size * self.layer_bytes_per_token(layer)
        return total

    def shard(self, num_devices: int) -> "KVSpec":
        """The spec of what one device holds under tensor parallelism (section 2).

        KV heads are divided where they can be; where there are fewer heads than devices, each is
        held by several; an MLA latent is held by every device.

        Args:
          num_devices: devices the heads are spread over.

        Raises:
          ValueError: some layer's heads neither divide by the devices nor divide them.

        >>> spec = KVSpec((LayerSpec.gqa(8, 128),) * 32)
        >>> [spec.shard(n).bytes_per_token // 2**10 for n in (1, 2, 8, 16)]
        [128, 64, 16, 16]

        MQA's one head does not divide: eight devices hold eight copies, not an eighth each.

        >>> mqa = KVSpec((LayerSpec.gqa(1, 128),) * 32)
        >>> mqa.shard(8).bytes_per_token == mqa.bytes_per_token, mqa.replication(8)[0]
        (True, 8)
        """
        layers = []
        for layer, copies in zip(self.layers, self.replication(num_devices), strict=True):
            if layer.kind != "mla":
                heads = layer.kv_heads * copies // num_devices
                layer = dataclasses.replace(layer, kv_heads=heads)
            layers.append(layer)
        return dataclasses.replace(self, layers=tuple(layers))

    def replication(self, num_devices: int) -> tuple[int, ...]:
        """How many devices hold the same KV head (or latent), layer by layer.

        Args:
          num_devices: devices the heads are spread over.

        Raises:
          ValueError: some layer's heads neither divide by the devices nor divide them.
        """
        check_integer("num_devices", num_devices, 1)
        copies = []
        for index, layer in enumerate(self.layers):
            heads = 1 if layer.kind == "mla" else layer.kv_heads
            if heads % num_devices and num_devices % heads:
                raise ValueError(
                    f"num_devices is {num_devices}: layer {index} has {heads} KV heads, and "
                    f"neither number divides the other; use a divisor or a multiple of {heads}"
                )
            copies.append(max(1, num_devices // heads))
        return tuple(copies)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens of one sequence occupy: the quotient, rounded up.

    Args:
      tokens: cached tokens.
      page_size: tokens a page holds.
    """
    check_integer("tokens", tokens, 0)
    check_integer("page_size", page_size, 1)
    return -(-tokens // page_size)


def wasted_slots(tokens: int, page_size: int) -> int:
    """Slots of a sequence's last page that hold no token, 0 to page_size - 1 (section 10.5).

    Args:
      tokens: cached tokens.
      page_size: tokens a page holds.

    >>> wasted_slots(8193, 16), wasted_slots(8193, 128)
    (15, 127)
    >>> [wasted_slots(8193, page_size) * 128 / 1024 for page_size in (16, 128)]  # MiB
    [1.875, 15.875]
    """
    return pages_for(tokens, page_size) * page_size - tokens
