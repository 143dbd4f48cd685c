"""Log-probs of tokens from logits that tensor parallelism splits by vocabulary: blocks on CPU, Triton on CUDA."""
