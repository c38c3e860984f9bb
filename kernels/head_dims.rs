/// Head dims that the attention kernels are compiled for.
const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
