"""Hugging Face <-> Megatron: one declarative rule table a family serves both directions and the weight sync."""
