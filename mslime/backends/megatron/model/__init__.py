"""The model of one rank: layers as megatron-core builds them, settings, names of its parameters, weights."""
