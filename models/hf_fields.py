"""Fields of a Hugging Face `config.json`, read one by one."""

from collections.abc import Mapping
from typing import Any


class Fields:
    """Typed access to one configuration; errors name its file and the field."""

    def __init__(self, source: str, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.source, self._fields, self._defaults = source, fields, defaults

    def given(self, key: str) -> bool:
        """Whether the file has a field, be it null."""
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """A field's value, or what stands for one that is absent or null."""
        value = self._fields.get(key, self._defaults.get(key))
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            found = "is missing" if value is None else f"is {value!r}, not an integer"
            raise ValueError(f"{self.source}: {key} {found}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "is missing" if value is None else f"is {value!r}, not a number"
            raise ValueError(f"{self.source}: {key} {found}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            found = "is missing" if value is None else f"is {value!r}, not true or false"
            raise ValueError(f"{self.source}: {key} {found}")
        return value

    def refuse(self, key: str, why: str) -> None:
        """Raises if a field is there and not null, zero, false or empty."""
        if self.get(key):
            raise ValueError(f"{self.source}: {key}={self.get(key)!r} is not supported: {why}")
