"""The trainer, on megatron-core. Importing this package makes megatron-core ready for a machine without CUDA.

`model/` builds and fills a rank's model, `step/` trains it, `replay/` forces its routing, `log_probs/` reads its
logits. This package itself contains the process groups (`parallel`) and the checkpoints (`checkpoint`,
`checkpoint_files`).
"""

from mslime.backends.cpu.megatron_patches import install

install()
