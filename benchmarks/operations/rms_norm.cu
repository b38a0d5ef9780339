// RMSNorm for bfloat16 rows of 2048, 4096 or 8192 elements: the rung of the ladder below Triton.
//
// A block of 256 threads holds a row in registers, 8 elements (16 bytes) per load. The backward pass runs a few blocks per
// multiprocessor, each walking over rows with its own float32 sums of the weight's gradient, and asks for the next row
// before it reduces the current one, so that loads are in flight during the reduction.
#include <cuda_bf16.h>

constexpr int THREADS = 256;

struct Eight {
    float value[8];
};

__device__ Eight widen(uint4 packed) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
    Eight wide;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 two = __bfloat1622float2(pairs[i]);
        wide.value[2 * i] = two.x;
        wide.value[2 * i + 1] = two.y;
    }
    return wide;
}

__device__ uint4 narrow(const Eight& wide) {
    uint4 packed;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = __floats2bfloat162_rn(wide.value[2 * i], wide.value[2 * i + 1]);
    return packed;
}

__device__ float block_sum(float mine) {
    __shared__ float per_warp[THREADS / 32];
    for (int other = 16; other; other >>= 1) mine += __shfl_xor_sync(~0u, mine, other);
    if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) total += per_warp[warp];
    __syncthreads();  // before the next row writes per_warp
    return total;
}

template <int LOADS>
__global__ void forward(const uint4* x, const uint4* weight, uint4* y, float* rstd, float eps) {
    constexpr int width = LOADS * THREADS * 8;
    const size_t row = size_t(blockIdx.x) * LOADS * THREADS;
    Eight mine[LOADS];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        mine[i] = widen(x[row + i * THREADS + threadIdx.x]);
        for (int j = 0; j < 8; j++) squares += mine[i].value[j] * mine[i].value[j];
    }
    const float r = rsqrtf(block_sum(squares) / width + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const Eight w = widen(weight[i * THREADS + threadIdx.x]);
        for (int j = 0; j < 8; j++) mine[i].value[j] *= r * w.value[j];
        y[row + i * THREADS + threadIdx.x] = narrow(mine[i]);
    }
}

template <int LOADS>
__global__ void backward(
    const uint4* dy, const uint4* x, const uint4* weight, const float* rstd, uint4* dx, float* sums, int rows) {
    constexpr int width = LOADS * THREADS * 8;
    constexpr int per_row = LOADS * THREADS;
    Eight w[LOADS], d_weight[LOADS] = {};
    uint4 next_dy[LOADS], next_x[LOADS];
    const size_t first = size_t(blockIdx.x) * per_row + threadIdx.x;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        w[i] = widen(weight[i * THREADS + threadIdx.x]);
        next_dy[i] = dy[first + i * THREADS];
        next_x[i] = x[first + i * THREADS];
    }
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const float r = rstd[row];
        Eight g[LOADS], x_hat[LOADS];
        float product = 0;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            g[i] = widen(next_dy[i]);
            x_hat[i] = widen(next_x[i]);
            for (int j = 0; j < 8; j++) {
                x_hat[i].value[j] *= r;
                d_weight[i].value[j] += g[i].value[j] * x_hat[i].value[j];
                g[i].value[j] *= w[i].value[j];
                product += g[i].value[j] * x_hat[i].value[j];
            }
        }
        if (row + gridDim.x < rows) {
            const size_t next = size_t(row + gridDim.x) * per_row + threadIdx.x;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                next_dy[i] = dy[next + i * THREADS];
                next_x[i] = x[next + i * THREADS];
            }
        }
        const float mean = block_sum(product) / width;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            for (int j = 0; j < 8; j++) g[i].value[j] = r * (g[i].value[j] - x_hat[i].value[j] * mean);
            dx[size_t(row) * per_row + i * THREADS + threadIdx.x] = narrow(g[i]);
        }
    }
    float* mine = sums + size_t(blockIdx.x) * width;
#pragma unroll
    for (int i = 0; i < LOADS; i++)
        for (int j = 0; j < 8; j++) mine[(i * THREADS + threadIdx.x) * 8 + j] = d_weight[i].value[j];
}

__global__ void add_sums(const float* sums, __nv_bfloat16* d_weight, int blocks, int width) {
    __shared__ float partial[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float total = 0;
    for (int block = threadIdx.y; block < blocks; block += 8) total += sums[size_t(block) * width + column];
    partial[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y) return;
    for (int i = 1; i < 8; i++) total += partial[i][threadIdx.x];
    d_weight[column] = __float2bfloat16(total);
}

#define FOR_WIDTH(width, LAUNCH)          \
    switch (width) {                      \
        case 2048: LAUNCH(1); break;      \
        case 4096: LAUNCH(2); break;      \
        case 8192: LAUNCH(4); break;      \
        default: return -1;               \
    }

extern "C" int rms_norm_forward(
    const uint4* x, const uint4* weight, uint4* y, float* rstd, int rows, int width, float eps, cudaStream_t stream) {
#define LAUNCH(LOADS) forward<LOADS><<<rows, THREADS, 0, stream>>>(x, weight, y, rstd, eps)
    FOR_WIDTH(width, LAUNCH)
#undef LAUNCH
    return cudaGetLastError();
}

extern "C" int rms_norm_backward(
    const uint4* dy, const uint4* x, const uint4* weight, const float* rstd, uint4* dx, float* sums,
    __nv_bfloat16* d_weight, int rows, int width, int blocks, cudaStream_t stream) {
#define LAUNCH(LOADS) backward<LOADS><<<blocks, THREADS, 0, stream>>>(dy, x, weight, rstd, dx, sums, rows)
    FOR_WIDTH(width, LAUNCH)
#undef LAUNCH
    add_sums<<<width / 32, dim3(32, 8), 0, stream>>>(sums, d_weight, blocks, width);
    return cudaGetLastError();
}
