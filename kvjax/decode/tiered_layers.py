"""Which layers choose pages, and how many those with a sliding window keep instead."""

import dataclasses

from kvjax.errors import KvjaxError
from kvjax.model import Model, keeps_latents
from kvjax.spec import KVSpec


def selecting_layers(spec: KVSpec) -> tuple[int, ...]:
    """The layers that see the whole context, and so choose pages.

    Args:
      spec: of the model.
    """
    return tuple(index for index, layer in enumerate(spec.layers) if layer.window is None)


def selecting(spec: KVSpec) -> KVSpec:
    """What pages of the layers that choose them hold; index keys are kept apart.

    Args:
      spec: of the model, with one such layer at least.
    """
    chosen_from = (spec.layers[index] for index in selecting_layers(spec))
    layers = tuple(dataclasses.replace(layer, index_dim=0) for layer in chosen_from)
    return dataclasses.replace(spec, layers=layers)


def slot_bytes(spec: KVSpec, page_size: int) -> tuple[int, ...]:
    """Bytes of one KV head's page in each layer that chooses pages.

    Args:
      spec: of the model.
      page_size: tokens a page.
    """
    return tuple(
        page_size * spec.layer_bytes_per_token(layer) // layer.pool_dims[0]
        for layer in selecting(spec).layers
    )


def ring_pages(window: int, page_size: int, pages: int | None = None) -> int:
    """Pages that a window can reach into, that of the token which is written included.

    Args:
      window: W, tokens that a query sees, itself included.
      page_size: tokens a page.
      pages: most pages of a row, if that is known.

    >>> [ring_pages(window, 16) for window in (1, 2, 16, 17, 18, 512)]
    [1, 2, 2, 2, 3, 33]
    """
    most = -(-(window - 1) // page_size) + 1
    return most if pages is None else min(most, pages)


def ring_bytes(spec: KVSpec, page_size: int, pages: int | None = None) -> int:
    """Bytes of one row's pages in all layers with a sliding window.

    Args:
      spec: of the model.
      page_size: tokens a page.
      pages: most pages of a row, if that is known.
    """
    elements = sum(
        layer.elements_per_token * ring_pages(layer.window, page_size, pages)
        for layer in spec.layers
        if layer.window is not None
    )
    return elements * page_size * spec.bytes_per_element


def check_layers(model: Model, *, stored: bool = False) -> None:
    """Refuse a model in which there is nothing to choose from, or whose layers are too different.

    Args:
      model: what runs.
      stored: whether its pages go to a store.

    Raises:
      KvjaxError: it is such a model.
    """
    layers = model.config.layers
    windows = [layer.window for layer in layers if layer.window is not None]
    if len(windows) == len(layers):
        raise KvjaxError(
            f"every layer of {model.name} has a sliding window: no step reads more than the last "
            f"{max(windows)} tokens, so there are no pages to choose from; leave out select"
        )
    if keeps_latents(model.config):
        return  # pages are of one head, and rows have room for the largest layer's
    kinds = {(x.num_kv_heads, x.head_dim, x.latent is None) for x in layers if x.window is None}
    if len(kinds) > 1:
        raise KvjaxError(
            f"{model.name} has layers of different shapes that see the whole context: pages are "
            f"chosen and moved where these are alike; leave out select"
        )
    if stored and len({(x.num_kv_heads, x.head_dim) for x in layers}) > 1:
        raise KvjaxError(
            f"store is given and layers of {model.name} with a sliding window have another shape "
            f"than those without: a stored prompt has pages of all layers, of one shape; leave out "
            f"store, and host memory holds the pages"
        )
