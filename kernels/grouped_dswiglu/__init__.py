"""The backward of a SwiGLU in the epilogue of the grouped GEMM that makes its cotangent."""
