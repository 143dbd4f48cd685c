"""`python -m mslime`, as `mslime`."""

import sys

from mslime.cli import main

sys.exit(main())
