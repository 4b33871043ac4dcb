"""Benchmarks: one runner over a table of ops, shapes and peers. `python -m benchmarks --help`."""
