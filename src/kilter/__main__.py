"""`python -m kilter`: the command line, for those who start it through torchrun or a debugger."""

import sys

from kilter.app.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
