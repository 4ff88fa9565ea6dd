"""A vLLM connector that can hand out cached tokens without computing them, when told to.

vLLM's own DecodeBenchConnector writes dummy keys and values into the blocks of a new sequence, so
that decoding at a long context is measured without prefilling it. Here it does so only while
`FilledCache.filling` is set: prompts whose prefill is timed, or whose tokens are compared, are
read.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
)


class FilledCache(DecodeBenchConnector):
    """Fills every block of sequences that arrive while `filling` is true, with distinct blocks."""

    filling = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """How many tokens of a new sequence need no prefill."""
        if not FilledCache.filling:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
