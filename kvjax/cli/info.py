"""`kvjax info`: what this machine has and what runs on it."""

import importlib.metadata
import json
import platform
from typing import Annotated, Any

import rich.table
import typer
from rich.console import Console

from kvjax.cli import options
from kvjax.config import CacheConfig
from kvjax.errors import KvjaxError
from kvjax.load import devices, resolve_dtype
from kvjax.pallas_kernels import IMPLEMENTATIONS, OPERATIONS, supported
from kvjax.registry import MODELS, cache_root, model_path

PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "libtpu")


def info(
    head_dim: Annotated[
        int, typer.Option(min=1, help="Judge the kernels for this head width.")
    ] = 128,
    page_size: Annotated[int, typer.Option(help="Judge the kernels for this page size.")] = 16,
    cache_dtype: Annotated[
        str, typer.Option(help="Judge the kernels for this dtype.")
    ] = "bfloat16",
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Devices, versions, models, and which attention kernels run here.

    Example: kvjax info --head-dim 64
    """
    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **_versions()},
        **_hardware(head_dim, page_size, cache_dtype),
        "cache_dir": str(cache_root(cache_dir)),
        "models": {name: model_path(name, cache_dir).exists() for name in MODELS},
    }
    if as_json:
        print(json.dumps(facts))
        return
    console = Console(highlight=False)
    console.print("  ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    if not facts["devices"]:
        console.print(facts["no_device"], style="red", soft_wrap=True)
    for device in facts["devices"]:
        console.print(f"device {device['id']}: {device['kind']} ({device['platform']})")
    if facts["devices"]:
        console.print(f"--dtype auto is {facts['dtype']} here")
    here = [name for name, there in facts["models"].items() if there]
    console.print(f"models in {facts['cache_dir']}: {', '.join(here) or 'none'}", soft_wrap=True)
    if facts["devices"]:
        what = f"head_dim {head_dim}, pages of {page_size} {cache_dtype}"
        console.print(_kernel_table(facts["kernels"], what))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hardware(head_dim: int, page_size: int, cache_dtype: str) -> dict[str, Any]:
    """Devices and what runs on them, or why there are none."""
    kernels = CacheConfig(page_size=page_size, dtype=cache_dtype)
    try:
        found = devices()
    except KvjaxError as error:
        return {"devices": [], "no_device": str(error), "dtype": None, "kernels": []}
    return {
        "devices": [
            {"id": device.id, "platform": device.platform, "kind": device.device_kind}
            for device in found
        ],
        "dtype": resolve_dtype("auto"),
        "kernels": _kernels(head_dim, page_size, kernels.dtype or cache_dtype),
    }


def _kernels(head_dim: int, page_size: int, dtype: str) -> list[dict[str, str | None]]:
    """One row for every operation and implementation; "reason" is why it does not run here."""
    return [
        {
            "operation": operation,
            "implementation": implementation,
            "reason": supported(
                operation,
                implementation,
                head_dim=head_dim,
                page_size=page_size,
                dtype=dtype,
            ),
        }
        for operation in OPERATIONS
        for implementation in IMPLEMENTATIONS
    ]


def _kernel_table(rows: list[dict[str, str | None]], title: str) -> rich.table.Table:
    grid = rich.table.Table(title=f"attention kernels for {title}", title_justify="left")
    for column in ("operation", "implementation", "runs here"):
        grid.add_column(column)
    for row in rows:
        reason = row["reason"]
        grid.add_row(
            row["operation"],
            row["implementation"],
            "[green]yes[/green]" if reason is None else f"no: {reason}",
        )
    return grid
