"""`python -m benchmarks`."""

import sys

from .options import make_parser

if __name__ == "__main__":
    make_parser().parse_args()  # --help and wrong options end here, before torch is imported
    from .cli import main

    sys.exit(main())
