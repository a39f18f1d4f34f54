"""`python -m kilter.connect.entry SCRIPT ARGS...`: what our torchrun starts for every rank."""

import os
import sys

from kilter.connect.launch import run_governed, worker
from kilter.core.errors import KilterError

if __name__ == "__main__":
    try:
        program, options = worker(sys.argv[1:], os.environ)
    except KilterError as error:
        print(f"kilter run: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    run_governed(program, options)
