"""`python -m mslime`, the same as `mslime`."""

import sys

from mslime.cli import main

sys.exit(main())
