"""One script a claim: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
