"""Hugging Face <-> Megatron by one declarative rule table a family, for both directions and weight syncs."""
