"""`python -m npu_trainer_kernels`: the same as `npu-kernels`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
