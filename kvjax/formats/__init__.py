"""How a token is stored: formats of pages in fewer bits than the model's own."""

from kvjax.formats.packing import Packing

__all__ = ["Packing"]
