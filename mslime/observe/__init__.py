"""What a person sees of a run: metrics, progress, a timeline and one HTML page. Nothing here imports an engine."""
