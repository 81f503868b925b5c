"""The gated delta net of Qwen3-Next, 3.5 and 3.6: its definition, its state, its kernels."""
