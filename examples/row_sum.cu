// y[row] = sum over columns of x[row, column]; one block a row, a tree in shared memory.
//
// THREADS and WAITS are compile-time choices, which Python gives a value each.
// Bound by memory: every x is read once, and little is done with it.

extern "C" __global__ void row_sum(const float* x, float* y, int columns) {
    __shared__ float parts[THREADS];
    float sum = 0.f;
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        sum += x[static_cast<long long>(blockIdx.x) * columns + column];
    }
    parts[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (WAITS) __syncthreads();  // without it a thread may add a value that is not written yet
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) y[blockIdx.x] = parts[0];
}
