"""What `mslime convert` does: each module is one conversion, or one way to look at checkpoints."""
