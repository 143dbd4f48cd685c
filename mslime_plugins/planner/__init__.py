"""What a run will need, from config.json and the configuration alone: memory, balance, bytes on the links."""
