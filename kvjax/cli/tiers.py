"""Options of commands whose decode steps read selected pages of a context that does not fit."""

import dataclasses
import pathlib
import re
from typing import Annotated

import typer

from kvjax.cli.console import size_of
from kvjax.cli.stored import Codec
from kvjax.config import CacheConfig
from kvjax.decode import PrefixConfig
from kvjax.decode.results import TierStats
from kvjax.errors import KvjaxError
from kvjax.policies import DistilledIndexer, Place, Select, Window
from kvjax.policies.tiering import DEFAULT_BUDGET, NAMES

PANEL = "Selected pages"


@dataclasses.dataclass(frozen=True)
class TierOptions:
    """What a command was told about selecting pages.

    Attributes:
      select: how; None reads all pages in every step.
      window: what stays near.
      calibration: a file of `kvjax calibrate tiers`, or None.
      order: how pages lie in the store's files.
      keep_generated: whether the answer's pages join the store.
      codec: how pages are encoded in the store.
      hot_exact: whether near pages stay as the model made them.
      observe: last tokens of the prompt that say what is near at first.
      indexer: the file that says what `select` selects by, or None.
    """

    select: Select | None
    window: Window
    calibration: pathlib.Path | None = None
    order: str = Place.order
    keep_generated: bool = Place.keep_generated
    codec: str = Place.codec
    hot_exact: bool = Place.hot_exact
    observe: int = Place.observe
    indexer: pathlib.Path | None = None

    @property
    def given(self) -> list[str]:
        """The options that say something, but for those of what selects the pages."""
        default = TierOptions(None, Window())
        said = (
            ("--window", self.window.times != Window.times),
            ("--window-plan", self.window.plan is not None),
            ("--evict", self.window.evict != Window.evict),
            ("--calibration", self.calibration is not None),
            ("--page-order", self.order != default.order),
            ("--keep-generated", self.keep_generated),
            ("--codec", self.codec != default.codec),
            ("--hot-exact", self.hot_exact),
            ("--observe", self.observe != default.observe),
        )
        return [option for option, is_said in said if is_said]

    @property
    def selected_by(self) -> str:
        """The option that says what selects the pages, as it is typed."""
        if self.indexer is not None:
            return f"--indexer {self.indexer}"
        return f"--select {self.select.by if self.select else Select.by}"


def tier_options(
    select: Annotated[
        str | None,
        typer.Option(
            help=f"Read only selected pages in every step, by: {', '.join(NAMES)}.",
            rich_help_panel=PANEL,
            show_default="all pages are read",
        ),
    ] = None,
    indexer: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="What `kvjax distill indexer` learned of the model, to select by in place of "
            "--select.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    step_budget: Annotated[
        str | None,
        typer.Option(
            help="Pages that a step reads, for every KV head: '5%', '64 pages', '1024 tokens', "
            "'8MB'. Below 100% the answer is an approximation.",
            rich_help_panel=PANEL,
            show_default=f"{DEFAULT_BUDGET}; 100% with --select indexer",
        ),
    ] = None,
    aggregate: Annotated[
        str,
        typer.Option(
            help="How the query heads of a KV head agree on its pages: by the sum, max or mean of "
            "their attention, or query, each naming pages by turns.",
            rich_help_panel=PANEL,
        ),
    ] = Select.aggregate,
    step_pooling: Annotated[
        float,
        typer.Option(
            help="Share of a neighbour's attention that a page is selected by if its own is less, "
            "0 to 1.",
            rich_help_panel=PANEL,
        ),
    ] = Select.pooling,
    window: Annotated[
        float | None,
        typer.Option(
            help="Pages that stay near from step to step, in multiples of those that a step reads.",
            rich_help_panel=PANEL,
            show_default=str(Window.times),
        ),
    ] = None,
    window_plan: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="A saved plan of how many pages of each layer and KV head stay near, in place of "
            "--window.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    evict: Annotated[
        str,
        typer.Option(
            help="What makes room for others: lookahead, lru or lfu.", rich_help_panel=PANEL
        ),
    ] = Window.evict,
    observe: Annotated[
        int,
        typer.Option(
            help="Last tokens of the prompt whose attention says which pages are near at first.",
            rich_help_panel=PANEL,
        ),
    ] = Place.observe,
    calibration: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="What `kvjax calibrate tiers` found, in place of --window and --window-plan.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    page_order: Annotated[
        str,
        typer.Option(
            help="How pages lie in --store: by position, or by cluster, near keys next to each "
            "other.",
            rich_help_panel=PANEL,
        ),
    ] = Place.order,
    keep_generated: Annotated[
        bool,
        typer.Option(
            "--keep-generated",
            help="Store the answer's pages too, for prompts that go on; needs --step-budget 100%.",
            rich_help_panel=PANEL,
        ),
    ] = Place.keep_generated,
    codec: Codec = Place.codec,
    hot_exact: Annotated[
        bool,
        typer.Option(
            "--hot-exact",
            help="With --format: pages stay as the model made them while they are near.",
            rich_help_panel=PANEL,
        ),
    ] = Place.hot_exact,
) -> TierOptions:
    """How a step's pages are selected; every command that decodes takes these."""
    chosen = None
    given = {"budget": step_budget, "aggregate": aggregate, "pooling": step_pooling}
    if select is not None and indexer is not None:
        raise KvjaxError(
            f"--select is {select!r} and --indexer is {indexer}: both say what selects the pages; "
            f"leave out one of them"
        )
    by = select if indexer is None else DistilledIndexer.load(indexer)
    if by is not None:
        try:
            chosen = Select(by=by, **given)  # type: ignore[arg-type]  # Select refuses
        except KvjaxError as error:
            raise KvjaxError(re.sub("^(budget|pooling) is", r"--step-\1 is", str(error))) from None
    for option, value in given.items():
        if chosen is None and value != getattr(Select, option):
            name = option if option == "aggregate" else f"step-{option}"
            raise KvjaxError(
                f"--{name} is of use with --select or --indexer only: say what selects the pages, "
                f"such as --select low-bit"
            )
    if window is not None and window_plan is not None:
        raise KvjaxError(
            f"--window is {window:g} and --window-plan is {window_plan}: the plan says how many "
            f"pages stay near; leave out one of them"
        )
    if calibration is not None and (window is not None or window_plan is not None):
        raise KvjaxError(
            f"--calibration is {calibration}, and --window or --window-plan is given too: it says "
            f"how many pages stay near; leave out one of them"
        )
    times = Window.times if window is None else window
    kept = Window(times, evict, window_plan)  # type: ignore[arg-type]  # Window refuses
    return TierOptions(
        chosen, kept, calibration, page_order, keep_generated, codec, hot_exact, observe, indexer
    )


def with_tiers(
    cache: CacheConfig,
    tiers: TierOptions,
    config: PrefixConfig,
    *,
    store: str | None,
) -> CacheConfig:
    """The cache of a command that may select pages.

    Args:
      cache: without.
      tiers: what was said of it.
      config: options that stored prefixes have too: memory, bits and how long to wait for a read.
      store: where every page of the prompt goes; None is host memory.

    Raises:
      KvjaxError: they do not go together.
    """
    if tiers.select is None:
        given = tiers.given
        if given:
            raise KvjaxError(
                f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} of use with --select or "
                f"--indexer only: say what selects the pages, such as --select low-bit"
            )
        return cache
    default = PrefixConfig()
    shared = ("bits", "host_bytes", "device_bytes", "timeout_s")
    theirs = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in shared and getattr(config, field.name) != getattr(default, field.name)
    ]
    if theirs == ["pooling"]:
        raise KvjaxError(
            f"pooling is {config.pooling!r}, which is of stored prefixes: with --select give "
            f"--step-pooling"
        )
    if theirs:
        raise KvjaxError(
            f"{theirs[0]} is {getattr(config, theirs[0])!r}, which is of stored prefixes: with "
            f"--select leave it out"
        )
    host_bytes = config.host_bytes
    if store is None and host_bytes != PrefixConfig.host_bytes:
        raise KvjaxError(
            f"--host-budget is {size_of(host_bytes)} and --store is not given: host memory holds "
            f"all pages then; name a store for those that do not fit, or leave out --host-budget"
        )
    place = Place(
        device_bytes=config.device_bytes or None,
        host_bytes=None if store is None else host_bytes,
        store=store,
        timeout_s=config.timeout_s,
        order=tiers.order,  # type: ignore[arg-type]  # Place refuses
        keep_generated=tiers.keep_generated,
        hot_exact=tiers.hot_exact,
        observe=tiers.observe,
        codec=tiers.codec,  # type: ignore[arg-type]
    )
    select = dataclasses.replace(tiers.select, bits=config.bits)
    return dataclasses.replace(cache, select=select, window=tiers.window, place=place)


def tier_rows(tiers: TierStats) -> list[tuple[str, str]]:
    """What selected pages moved, as rows of a table."""
    ratio = tiers.hit_ratio
    near = f"{tiers.slots:,}"
    if tiers.least_slots < tiers.slots:
        near = f"{tiers.least_slots:,} to {near}"
    host = tiers.host_bytes + (tiers.store.host_bytes if tiers.store else 0)
    rows = [
        ("pages a KV head reads a step", f"{tiers.pages_chosen:,}"),
        ("pages a KV head has near", near),
        ("page reads that were near", "-" if ratio is None else f"{ratio:.1%} of {tiers.reads:,}"),
        *(
            ()
            if tiers.amplification is None
            else (("tokens read for one attended to", f"{tiers.amplification:.1f}"),)
        ),
        ("fetched", size_of(tiers.bytes_moved)),
        ("index", size_of(tiers.index_bytes)),
        ("room in host memory", size_of(host)),
    ]
    if tiers.store is not None:
        rows += [
            ("read from the store", size_of(tiers.store.bytes_read)),
            (
                "requests to the store",
                f"{tiers.store.requests:,} for {tiers.store.units_read:,} pages",
            ),
            ("of fetches, in host memory", f"{tiers.store.host_hits:,} of {tiers.store.units:,}"),
            ("waited for reads", f"{tiers.store.wait_seconds:.3f} s"),
        ]
        if tiers.store.pages_kept:
            rows.append(("pages added to the store", f"{tiers.store.pages_kept:,}"))
        if tiers.store.not_kept is not None:
            rows.append(("pages not added to the store", tiers.store.not_kept))
    return rows
