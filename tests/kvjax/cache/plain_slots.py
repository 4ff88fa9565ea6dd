"""The slots of one KV head in plain Python, which `kvjax.cache.residency` must equal."""

import math


class Slots:
    """Which page is in which slot.

    Args:
      total: N, pages a sequence may have.
      slots: S.
    """

    def __init__(self, total, slots):
        self.total, self.slots = total, slots
        self.page_in = [None] * slots
        self.rank = [0.0] * slots

    def find(self, page):
        """The page's slot; S where it is not near or is no page."""
        return (
            self.page_in.index(page) if self.is_page(page) and page in self.page_in else self.slots
        )

    def is_page(self, page):
        return 0 <= page < self.total

    def ranked(self, evict, mass, read, step):
        """`mass` is of all pages, `read` of all slots."""
        for slot, page in enumerate(self.page_in):
            if evict == "lookahead":
                self.rank[slot] = 0.0 if page is None else mass[page]
            elif evict == "lru":
                self.rank[slot] = step if read[slot] else self.rank[slot]
            else:
                self.rank[slot] += read[slot]

    def admit(self, pages, rank, keep):
        """The slot of each page, S for what is no page."""

        def worth(slot):
            return -math.inf if self.page_in[slot] is None else self.rank[slot]

        free = sorted((s for s in range(self.slots) if not keep[s]), key=lambda s: (worth(s), s))
        taken = [free.pop(0) if self.is_page(page) else self.slots for page in pages]
        for page, value, slot in zip(pages, rank, taken, strict=True):
            if slot < self.slots:
                self.page_in[slot], self.rank[slot] = page, value
        return taken

    def only(self, keep):
        """Forget what is in the other slots."""
        self.page_in = [page if k else None for page, k in zip(self.page_in, keep, strict=True)]
