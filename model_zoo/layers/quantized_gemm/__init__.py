"""GEMMs with quantized weights: packing, dequantizing kernels, fp8 products."""
