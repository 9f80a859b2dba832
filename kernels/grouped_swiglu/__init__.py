"""The grouped GEMM with a SwiGLU epilogue: ``silu(x · w_gate) * (x · w_up)`` by groups of rows."""
