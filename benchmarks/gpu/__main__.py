"""What only a GPU can tell about the cache: whether it is exact there, and how fast it is.

python -m benchmarks.gpu
python -m benchmarks.gpu --rehearse
"""

from __future__ import annotations

import faulthandler
import os
import sys

from benchmarks.gpu.options import parse_options

# So long a part that was begun in time may take beyond the budget.
GRACE_SECONDS = 90.0


def main() -> int:
    options = parse_options(sys.argv[1:])
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when it is imported
    # Threads that wait for one another for ever would use up a machine that is lent: this says where they stand.
    faulthandler.dump_traceback_later(options.budget_seconds + GRACE_SECONDS, exit=True)
    from benchmarks.gpu.program import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
