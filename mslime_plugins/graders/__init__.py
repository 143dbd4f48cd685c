"""Graders for text and mathematics: the kinds math, answer_line, letters and f1 of `reward.kind`."""
