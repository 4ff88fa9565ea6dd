"""Which implementation runs where, and in words why another does not."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh
from jax.typing import DTypeLike

from kvjax.pallas_kernels.packed_pages import PackedPages

Operation = Literal[
    "paged_attention",
    "ragged_paged_attention",
    "sparse_paged_attention",
    "merge_attention",
    "page_scores",
    "low_bit_scores",
    "float8_paged_attention",
    "latent_attention",
    "lightning_indexer",
]
Implementation = Literal["reference", "xla", "tpu", "gpu"]

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

TPU_HEAD_DIMS = (64, 80, 128, 256)
TPU_DTYPES = ("float32", "bfloat16")
GPU_MAX_HEAD_DIM = 256
# Position keys and latents are as wide as the model has them, up to these, on TPU and GPU.
MAX_ROPE_DIM, MAX_LATENT_DIM = 256, 512


def target_platform() -> str:
    """Name the platform that what is being called or traced now will run on.

    An abstract mesh with an abstract device in context (ahead-of-time compilation for a machine
    that is not here) goes before `jax.default_device`, and that before the default backend.

    Returns:
        "cpu", "tpu" or "gpu".
    """
    device = get_abstract_mesh().abstract_device
    if device is not None:
        return str(device.platform)
    settings: Any = jax.config  # its attributes are made at run time
    default = settings.jax_default_device
    if default is None:
        return jax.default_backend()
    return default if isinstance(default, str) else str(default.platform)


def supported(
    op: Operation,
    implementation: Implementation,
    *,
    platform: str | None = None,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    page_size: int = 16,
    dtype: DTypeLike = jnp.bfloat16,
    pools: Sequence[Any] = (),
) -> str | None:
    """Say why an implementation cannot run; None means that it can.

    Args:
        op: the operation.
        implementation: one of `IMPLEMENTATIONS`.
        platform: "cpu", "tpu" or "gpu"; None means where a call made now would run.
        head_dim: width of a query and of a key; of a position key, where there are latents.
        v_head_dim: width of a value, or of a latent; None means `head_dim`.
        page_size: tokens a page, where pages are read.
        dtype: of the pages, of what is merged, of the pages' representatives, or of the queries
            where keys are low-bit or pages are packed; bfloat16 for float8 index keys.
        pools: keys and values, where they may be packed; plain ones are not looked at.

    Returns:
        The reason as a clause that completes "cannot run: ...", or None. What the shapes forbid
        is said before what the platform lacks.

    Raises:
        ValueError: `op` or `implementation` is not a known name.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(OPERATIONS)}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; it must be None (kvjax chooses) or one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    platform = target_platform() if platform is None else platform
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    if implementation in ("tpu", "gpu"):
        for pool in pools:
            unread = _unread_by_kernels(pool) if isinstance(pool, PackedPages) else None
            if unread is not None:
                return unread
    if implementation == "tpu":
        widths = _latent_widths if op == "latent_attention" else _tpu_widths
        refused = widths(head_dim, v_head_dim)
        return refused or _tpu(platform, page_size, jnp.dtype(dtype).name)
    if implementation == "gpu":
        widths = _latent_widths if op == "latent_attention" else _gpu_widths
        return widths(head_dim, v_head_dim) or _gpu(platform)
    return None


def choose(
    op: Operation,
    implementation: Implementation | None,
    *,
    head_dim: int,
    v_head_dim: int | None = None,
    page_size: int = 16,
    dtype: DTypeLike,
    pools: Sequence[Any] = (),
) -> Implementation:
    """Pick the implementation, or insist on the named one.

    The Triton kernels are never picked unasked: XLA is the default everywhere but on TPU.

    Args:
        op: the operation.
        implementation: the caller's choice; None picks "tpu" on a TPU that can run it, else "xla".
        head_dim: width of a query and of a key.
        v_head_dim: width of a value; None means `head_dim`.
        page_size: tokens a page, where pages are read.
        dtype: of the pages, of what is merged, of the pages' representatives, or of the queries
            where keys are low-bit or pages are packed; bfloat16 for float8 index keys.
        pools: keys and values, where they may be packed; plain ones are not looked at.

    Returns:
        The name of the implementation to run.

    Raises:
        ValueError: the named implementation is unknown or cannot run here; the message says why.
    """

    def reason(name: Implementation) -> str | None:
        return supported(
            op,
            name,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            page_size=page_size,
            dtype=dtype,
            pools=pools,
        )

    if implementation is None:
        return "tpu" if target_platform() == "tpu" and reason("tpu") is None else "xla"
    why_not = reason(implementation)
    if why_not is not None:
        raise ValueError(
            f"implementation={implementation!r} of {op} cannot run: {why_not}; pass "
            "implementation=None to let kvjax choose one that does"
        )
    return implementation


def _unread_by_kernels(pool: PackedPages) -> str | None:
    """What of a packing only XLA reads."""
    for name, what in (
        ("levels", "codes stand for entries of a table"),
        ("outlier_at", "some elements stand outside their codes"),
        ("position", "keys are packed before their rotary embedding"),
    ):
        if getattr(pool, name) is not None:
            return f"the pages have {name} ({what}) and the kernels read codes with scales only"
    return None


def _latent_widths(rope_dim: int, latent_dim: int) -> str | None:
    for name, width, most in (
        ("a position key", rope_dim, MAX_ROPE_DIM),
        ("a latent", latent_dim, MAX_LATENT_DIM),
    ):
        if width > most:
            return f"{name} has {width} elements and the kernels take at most {most}"
    return None


def _tpu_widths(head_dim: int, v_head_dim: int) -> str | None:
    for name, width in (("head_dim", head_dim), ("the values' head_dim", v_head_dim)):
        if width not in TPU_HEAD_DIMS:
            return f"{name} is {width} and the Mosaic kernel takes {_listed(TPU_HEAD_DIMS)}"
    return None


def _tpu(platform: str, page_size: int, dtype: str) -> str | None:
    if page_size % 8:
        return f"page_size is {page_size} and the Mosaic kernel takes multiples of 8"
    if dtype not in TPU_DTYPES:
        return f"the arrays are {dtype} and the Mosaic kernel takes {_listed(TPU_DTYPES)}"
    if platform != "tpu":
        return f"it needs a TPU and this program is for {platform}"
    return None


def _gpu_widths(head_dim: int, v_head_dim: int) -> str | None:
    for name, width in (("head_dim", head_dim), ("the values' head_dim", v_head_dim)):
        if width > GPU_MAX_HEAD_DIM:
            return f"{name} is {width} and the Triton kernel takes at most {GPU_MAX_HEAD_DIM}"
    return None


def _gpu(platform: str) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU and this program is for {platform}"
    return None


def _listed(values: tuple[int, ...] | tuple[str, ...]) -> str:
    return ", ".join(map(str, values))
