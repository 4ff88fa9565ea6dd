"""Which layers store keys and values in fewer bits, how, and which tokens stay as they are."""

import dataclasses
import math
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.errors import KvjaxError, as_kvjax_error, check_integer
from kvjax.formats.packing import Packing
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.validate_float8 import check_float8_pages
from kvjax.spec import KVSpec, LayerSpec


@runtime_checkable
class PagePacking(Protocol):
    """How pages of one layer's keys, or values, become codes. Hashable: static under jit."""

    def __hash__(self) -> int:
        """By what the packing does."""
        ...

    def check(self, what: str, page_size: int, dim: int) -> None:
        """Refuse pages that cannot be packed.

        Args:
          what: "keys" or "values", for the message.
          page_size: tokens a page.
          dim: elements of a head's row.

        Raises:
          KvjaxError: they cannot.
        """
        ...

    def encode(
        self, pages: Float[Array, "N Hkv P D"], positions: Int32[Array, " N"]
    ) -> PackedPages:
        """Pack whole pages, each head of each on its own.

        Args:
          pages: [N, Hkv, P, D].
          positions: int32 [N], the logical position of each page's first token.
        """
        ...

    def decode(self, packed: PackedPages) -> Float32[Array, "N Hkv P D"]:
        """What packed pages stand for."""
        ...


@dataclasses.dataclass(frozen=True)
class LayerFormat:
    """How one layer stores pages: `keys` and `values` say how each is packed.

    Of a layer that keeps latents (MLA) these are the rotated position keys and the latents.
    """

    keys: PagePacking
    values: PagePacking


@dataclasses.dataclass(frozen=True)
class Format:
    """How full pages are stored. A page is encoded once, when it leaves the newest `residual`.

    Attention to what is encoded reads codes; the newest tokens are kept and read as the model made
    them. A token that is computed sees as encoded exactly what was encoded when it came, whether
    it came in a prompt's chunk or alone, so results do not depend on how a text was cut. Two things
    are otherwise: `products` of float8 are of decode alone, and where steps select pages the
    prompt is prefilled exactly.

    Attributes:
      keys: how keys are packed.
      values: how values are packed.
      residual: newest tokens that stay as they are, rounded up to whole pages, at least one (KIVI,
        arXiv:2402.02750, section 3.3).
      sinks: first tokens that do too, rounded up to whole pages. Much attention goes to them, and
        their keys and values are unlike all others (KVQuant, arXiv:2401.18079, section 3.5).
      skip_layers: layers that are stored as they are; a negative one counts from the last.
      skip_windows: whether layers with a sliding window are too: they read few tokens.
      layers: packings of single layers that take the place of `keys` and `values`, each with its
        layer; a negative one counts from the last.
      products: "float32" turns codes back into numbers and multiplies these; "float8" has decode
        multiply the codes themselves, and rounds queries and softmax weights to float8 for that
        (`float8_paged_attention`); only of float8_e4m3fn codes whose scale a page's head shares.
      model: fingerprint of the model that the packings were calibrated for; None serves any.
      latents: what takes the place of `keys` and `values` in layers that keep latents (MLA); None
        packs position keys as keys, and latents as values.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    keys: PagePacking
    values: PagePacking
    residual: int = 0
    sinks: int = 0
    skip_layers: tuple[int, ...] = ()
    skip_windows: bool = True
    layers: tuple[tuple[int, LayerFormat], ...] = ()
    products: Literal["float32", "float8"] = "float32"
    model: str | None = None
    latents: LayerFormat | None = None

    def __post_init__(self) -> None:
        if self.products not in ("float32", "float8"):
            raise KvjaxError(f"products is {self.products!r}: must be 'float32' or 'float8'")
        check_integer("residual", self.residual, 0)
        check_integer("sinks", self.sinks, 0)
        try:
            skipped = tuple(
                int(check_integer("skip_layers", x, -(2**31))) for x in self.skip_layers
            )
            layers = tuple((check_integer("layers", i, -(2**31)), x) for i, x in self.layers)
        except TypeError:
            raise KvjaxError(
                f"skip_layers is {self.skip_layers!r} and layers {self.layers!r}: must be a tuple "
                f"of layers, and a tuple of pairs, a layer and its LayerFormat"
            ) from None
        wrong = [x for _, x in layers if not isinstance(x, LayerFormat)]
        if wrong:
            raise KvjaxError(f"layers has {wrong[0]!r}: must be a kvjax.formats.LayerFormat")
        if self.latents is not None and not isinstance(self.latents, LayerFormat):
            raise KvjaxError(
                f"latents is {self.latents!r}: must be a kvjax.formats.LayerFormat, or None"
            )
        object.__setattr__(self, "skip_layers", skipped)
        object.__setattr__(self, "layers", layers)
        for name in ("keys", "values"):
            if not isinstance(getattr(self, name), PagePacking):
                raise KvjaxError(
                    f"{name} is {getattr(self, name)!r}: must say how pages are packed, such as "
                    f"kvjax.formats.Packing(bits=4)"
                )

    def recent(self, page_size: int) -> int:
        """Most tokens of a sequence that stay as they are: whole pages, at least one.

        Args:
          page_size: tokens a page.
        """
        return max(1, -(-self.residual // page_size)) * page_size

    def sink_tokens(self, page_size: int) -> int:
        """First tokens of a sequence that stay as they are: whole pages.

        Args:
          page_size: tokens a page.
        """
        return -(-self.sinks // page_size) * page_size

    def layer(self, spec: KVSpec, index: int) -> LayerFormat | None:
        """How a layer's pages are packed; None if they are not.

        Args:
          spec: of the model.
          index: which layer.
        """
        layer = spec.layers[index]
        skipped = {i % len(spec.layers) for i in self.skip_layers}
        if index in skipped or (self.skip_windows and layer.window is not None):
            return None
        own = {i % len(spec.layers): chosen for i, chosen in self.layers}
        if layer.kind == "mla" and self.latents is not None:
            return own.get(index, self.latents)
        return own.get(index, LayerFormat(self.keys, self.values))

    def check(self, spec: KVSpec, page_size: int) -> None:
        """Refuse a model or page size that the format cannot store.

        Args:
          spec: of the model.
          page_size: tokens a page.

        Raises:
          KvjaxError: a group does not fill pages, a skipped layer is not there, or a layer keeps
            latents, and products are of float8, keys are packed before their rotary embedding, or
            the layer chooses tokens by an indexer.
        """
        count = len(spec.layers)
        named = [("skip_layers", i) for i in self.skip_layers]
        for name, index in (*named, *(("layers", i) for i, _ in self.layers)):
            if not -count <= index < count:
                raise KvjaxError(
                    f"{name} has layer {index}: the model has {count}, 0 to {count - 1}"
                )
        own = [index % count for index, _ in self.layers]
        twice = next((index for index in own if own.count(index) > 1), None)
        if twice is not None:
            raise KvjaxError(
                f"layers has layer {twice} more than once (of {count}; a negative one counts from "
                f"the last): give it one LayerFormat"
            )
        if all(self.layer(spec, index) is None for index in range(count)):
            raise KvjaxError(
                "format packs no layer: all are in skip_layers, or have a sliding window; pass "
                "skip_windows=False, or leave out format"
            )
        for index, shape in enumerate(spec.layers):
            chosen = self.layer(spec, index)
            if chosen is not None:
                for what, packing, _, dim in _parts(chosen, shape):
                    packing.check(what, page_size, dim)
                if shape.kind == "mla":
                    self._check_latents(index, chosen, shape, page_size)
                elif self.products == "float8":
                    self._check_products(chosen, shape, page_size)

    def _check_latents(
        self, index: int, chosen: LayerFormat, shape: LayerSpec, page_size: int
    ) -> None:
        if shape.top_tokens is not None:
            raise KvjaxError(
                f"format packs layer {index}, which chooses tokens by an indexer: what it chooses "
                f"is read as the model made it; leave out format"
            )
        if self.products == "float8":
            raise KvjaxError(
                f"products is 'float8' and layer {index} keeps latents, which are scored as well "
                f"as summed: attention in float8 has keys and values apart; leave products at "
                f"'float32'"
            )
        for what, packing, heads, dim in _parts(chosen, shape):
            if abstract_pages(packing, 2, heads, page_size, dim).position is not None:
                raise KvjaxError(
                    f"format packs {what} of layer {index} before their rotary embedding, and the "
                    f"layer keeps latents: their {what} are packed as they come; take a "
                    f"kvjax.formats.Packing"
                )

    def _check_products(self, chosen: LayerFormat, shape: LayerSpec, page_size: int) -> None:
        if shape.window is not None:
            raise KvjaxError(
                "products is 'float8' and a layer has a sliding window, which attention in float8 "
                "has not: leave skip_windows True, or products at 'float32'"
            )
        for what, packing, heads, dim in _parts(chosen, shape):
            pages = abstract_pages(packing, 2, heads, page_size, dim)
            with as_kvjax_error():
                check_float8_pages(what, pages)

    def bytes_per_page(self, spec: KVSpec, page_size: int) -> int:
        """Bytes of one page in every layer's pools, scales and all: what the arrays really take.

        Args:
          spec: of the model.
          page_size: tokens a page.
        """
        total = 0
        for index, shape in enumerate(spec.layers):
            chosen = self.layer(spec, index)
            total += spec.index_bytes_per_token(shape) * page_size
            if chosen is None:
                total += spec.bytes_per_element * shape.elements_per_token * page_size
            else:
                total += packed_page_bytes(chosen, shape, page_size)
        return total

    def bytes_per_token(self, spec: KVSpec, page_size: int) -> float:
        """Bytes a token of a full page takes over all layers, scales and all.

        Args:
          spec: of the model.
          page_size: tokens a page.
        """
        return self.bytes_per_page(spec, page_size) / page_size


def _parts(chosen: LayerFormat, shape: LayerSpec) -> tuple[tuple[str, PagePacking, int, int], ...]:
    """Both of a layer's pools: what one holds, how it is packed, KV heads and elements of a row."""
    heads, key_dim, value_dim = shape.pool_dims
    names = ("position keys", "latents") if shape.kind == "mla" else ("keys", "values")
    return (names[0], chosen.keys, heads, key_dim), (names[1], chosen.values, heads, value_dim)


def packed_page_bytes(chosen: LayerFormat, shape: LayerSpec, page_size: int) -> int:
    """Bytes that one more page adds to a layer's pools."""
    total = 0
    for _, packing, heads, dim in _parts(chosen, shape):
        packed = abstract_pages(packing, 2, heads, page_size, dim)
        grown = jax.tree.leaves(packed.stored())
        total += sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in grown)
    return total


def abstract_pages(
    packing: PagePacking, count: int, heads: int, page_size: int, dim: int
) -> PackedPages:
    """Shapes and dtypes of packed pages, without computing any."""
    pages = jax.ShapeDtypeStruct((count, heads, page_size, dim), jnp.float32)
    first = jax.ShapeDtypeStruct((count,), jnp.int32)
    packed: PackedPages = jax.eval_shape(packing.encode, pages, first)
    return packed


def empty_pages(
    packing: PagePacking, count: int, heads: int, page_size: int, dim: int
) -> PackedPages:
    """A packed pool of pages that nobody wrote.

    Args:
      packing: of the pages.
      count: N.
      heads: Hkv.
      page_size: P, tokens a page.
      dim: D.
    """
    one = packing.encode(
        jnp.zeros((1, heads, page_size, dim), jnp.float32), jnp.zeros((1,), jnp.int32)
    )
    grown = abstract_pages(packing, 2, heads, page_size, dim).stored()
    arrays = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), grown)
    return one.with_stored(arrays)


def float8(
    kind: str = "float8_e4m3fn",
    *,
    per: str = "page",
    scale: float | None = None,
    products: Literal["float32", "float8"] = "float32",
) -> Format:
    """8-bit floats, with a scale for each page's head, or each token's; or one given scale.

    Args:
      kind: "float8_e4m3fn" or "float8_e5m2".
      per: "page" or "token": what shares a scale.
      scale: one for everything, instead (vLLM's default is 1).
      products: as of `Format`.
    """
    if kind not in ("float8_e4m3fn", "float8_e5m2"):
        raise KvjaxError(f"kind is {kind!r}: must be 'float8_e4m3fn' or 'float8_e5m2'")
    if per not in ("page", "token"):
        raise KvjaxError(f"per is {per!r}: must be 'page' or 'token'")
    packing = Packing(
        kind,  # type: ignore[arg-type]  # Packing refuses others
        8,
        tokens=1 if per == "token" else None,
        symmetric=True,
        scale=scale,
    )
    return Format(packing, packing, products=products)


def int8() -> Format:
    """8-bit integers, symmetric, a scale for each token and head; of latents for each channel.

    Channels of latents, and of the position keys beside them, differ so much that a scale a token
    loses ten times as much (of SmolLM2, made into latents).
    """
    packing = Packing(bits=8, tokens=1, symmetric=True)
    return Format(packing, packing, latents=LayerFormat(by_channel(8), by_channel(8)))


def int4(
    *, bits: int = 4, value_bits: int | None = None, group: int = 32, sinks: int = 1
) -> Format:
    """Integers of 2 to 4 bits: keys by channel, over the page's tokens, values by token.

    Latents, which are keys as well as values, are packed as keys are: it loses less, and they may
    be of any width, which groups of channels would not divide.

    Args:
      bits: of keys, and of latents.
      value_bits: of values; None takes `bits`.
      group: channels of a value that share a scale.
      sinks: as of `Format`; one token is one page.
    """
    value_bits = bits if value_bits is None else value_bits
    for name, count in (("bits", bits), ("value_bits", value_bits)):
        if isinstance(count, bool) or count not in (2, 3, 4):
            raise KvjaxError(f"{name} is {count!r}: must be 2, 3 or 4")
    return Format(
        by_channel(bits),
        Packing(bits=value_bits, tokens=1, channels=group, scale_dtype="float8_e4m3fn"),
        sinks=sinks,
        latents=LayerFormat(by_channel(bits), by_channel(bits)),
    )


def by_channel(bits: int) -> Packing:
    """Integers with a scale for each of a head's channels, over the page's tokens.

    Args:
      bits: 2, 3, 4 or 8; below 8 around the middle of what the channel spans.
    """
    return Packing(bits=bits, channels=1, symmetric=bits == 8, scale_dtype="float8_e4m3fn")


def kivi(bits: int = 2, *, group: int = 32, residual: int = 128) -> Format:
    """KIVI (arXiv:2402.02750, section 3): keys by channel over tokens, values by token.

    Latents, which are keys and values, are packed as keys.

    Args:
      bits: 2 or 4.
      group: elements that share a scale and a middle, in float16 each; pages hold whole groups.
      residual: newest tokens that stay as they are.
    """
    if isinstance(bits, bool) or bits not in (2, 4):
        raise KvjaxError(f"bits is {bits!r}: must be 2 or 4")
    keys = Packing(bits=bits, tokens=group, channels=1, scale_dtype="float16")
    values = Packing(bits=bits, tokens=1, channels=group, scale_dtype="float16")
    return Format(keys, values, residual=residual, latents=LayerFormat(keys, keys))


NAMED = {
    "fp8": float8(),
    "fp8-e5m2": float8("float8_e5m2"),
    "fp8-products": float8(products="float8"),
    "int8": int8(),
    "int8-int4": Format(
        int8().keys, int4().values, sinks=1, latents=LayerFormat(by_channel(8), by_channel(4))
    ),
    "int4": int4(),
    "int4-int2": int4(value_bits=2),
    "int3": int4(bits=3),
    "int2": int4(bits=2),
    "kivi4": kivi(4),
    "kivi2": kivi(2),
}
"""Formats that a command or a configuration takes by name."""


def named_format(name: str) -> Format:
    """A format by its name.

    Raises:
      KvjaxError: there is none.
    """
    if name not in NAMED:
        raise KvjaxError(
            f"format is {name!r}: must be one of {', '.join(NAMED)}, or None; those of a "
            f"calibration are kvjax.formats.load_calibrated(path, name)"
        )
    return NAMED[name]
