"""From finished groups to what a rank trains on: packed rows, expert balance, shards."""
