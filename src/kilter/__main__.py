"""`python -m kilter`: the same as the command `kilter`."""

import sys

from kilter.app.cli.main import main

sys.exit(main())
