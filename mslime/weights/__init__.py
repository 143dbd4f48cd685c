"""Weight sync from trainer to engines: the plan as pure data, flat buckets, transports, and the versioned commit."""
