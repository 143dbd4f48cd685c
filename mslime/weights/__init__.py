"""Weight sync, trainer to engines: a plan that is pure data, flat buckets, transports, and the versioned commit."""
