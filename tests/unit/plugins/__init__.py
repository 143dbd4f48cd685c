"""Tests of `mslime_plugins`: the core and its tests do without them."""
