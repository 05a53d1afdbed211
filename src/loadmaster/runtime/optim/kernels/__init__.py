"""Sources of the fused kernels: C for the CPU, Triton for CUDA."""
