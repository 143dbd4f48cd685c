"""Pages about a run: a report, a comparison, and its responses, from the files that the run writes."""
