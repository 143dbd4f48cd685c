"""The trainer, on megatron-core. Importing this package makes megatron-core ready for a machine without CUDA."""

from mslime.backends.cpu.megatron import install

install()
