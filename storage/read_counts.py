"""An account of every unit that requests needed and of every one that was read for them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """What requests needed and what was read for them, in units unless another one is named.

    When nothing is left under way (after `Prefetcher.finish_request`), two sums are exact:
    `needed == device_hits + host_hits + prefetched + demanded + shared`, and
    `issued == prefetched + demanded + wasted + abandoned + failed`.
    """

    unit_bytes: int  # bytes of one unit
    needed: int = 0  # handed out by `collect`
    device_hits: int = 0  # of these, from device memory
    host_hits: int = 0  # from host memory
    prefetched: int = 0  # from a read that began before the unit was demanded
    demanded: int = 0  # from a read that began because of the demand
    shared: int = 0  # from a read that had served another ticket before
    issued: int = 0  # reads started
    batches: int = 0  # calls of `read`
    wasted: int = 0  # speculative reads that nobody used; kept for later where there is room
    abandoned: int = 0  # demanded reads that nobody used: cancelled, or a neighbour failed
    failed: int = 0  # reads that raised, or were given up as late
    retried: int = 0  # demanded again after that
    dropped: int = 0  # speculation beyond the bound, never queued
    wait_s: float = 0.0  # seconds that `collect` waited for reads
    read_s: float = 0.0  # seconds in which at least one read was under way

    def __add__(self, other: "ReadCounts") -> "ReadCounts":
        """The counts of both; their units are of the same size."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "unit_bytes"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return dataclasses.replace(self, **sums)

    @property
    def misses(self) -> int:
        """Units needed that no tier had."""
        return self.needed - self.device_hits - self.host_hits

    @property
    def needed_bytes(self) -> int:
        """Bytes handed out by `collect`."""
        return self.needed * self.unit_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that reads were started for."""
        return self.issued * self.unit_bytes

    @property
    def wasted_bytes(self) -> int:
        """Bytes of speculative reads that nobody used."""
        return self.wasted * self.unit_bytes
