"""The evidence for the choice of a backend (`backends`), what was measured and where; and what model families get.

- `table`: `table.json`, the one table of ops. For each op it has the order of backends on each kind of device, with the
  measurement or the reason for each. It comes with the package.
- `tuned`: the measurements of `npu-kernels tune` on this machine, in the user's cache folder. They go before the table.
- `families`: `families.json`, what each model family gets on the tested versions of transformers. It comes with the
  package.

The files do not import each other. Other folders import them one by one: `table` and `families` are read by commands
that must not import torch or look into the cache.
"""
