"""The Mosaic TPU kernel behind both attention operations.

Both operations are the same program: query blocks, each with a list of work items, each item one
sequence's queries within the block. `work` makes the list, `tiles` chooses the sizes, `stream`
moves pages, `pools` says what it moves of packed ones, `factors` gathers their scales, `coding`
unpacks them, `flash` folds pages in, `statistics` keeps what each page contributed, `kernel` puts
them together, `layout` says how a pool must lie in memory, `traffic` counts the bytes.
"""
