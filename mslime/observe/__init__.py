"""Output of a run for people: metrics, progress, a timeline and one HTML page. Nothing here imports an engine."""
