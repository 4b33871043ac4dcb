"""The evidence for the choice of a backend (`backends`): what was measured, and where.

- `table`: `table.json`, the one table of ops. For each op it has the order of backends on each kind of device, with the
  measurement or the reason for each. It comes with the package.
- `tuned`: the measurements of `npu-kernels tune` on this machine, in the user's cache folder. They go before the table.

The two files do not import each other. Other folders import them one by one: `table` alone is read by commands that
must not import torch or look into the cache.
"""
