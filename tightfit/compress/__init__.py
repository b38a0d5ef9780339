"""Making models smaller: quantization layer by layer, its cost told before, its error measured after."""
