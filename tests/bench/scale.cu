// y = 2x, and the ways in which a rung could cheat or fail: `FAULT` chooses one.
constexpr int NONE = 0, UNWRITTEN = 1, MUTATES = 2, WRONG_ELEMENT = 3, USES_WORKSPACE = 4;

extern "C" __global__ void scale(float* x, float* y, float* scratch, int size) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= size) return;
    const bool last = at == size - 1;
    if (FAULT == UNWRITTEN && last) return;
    y[at] = 2.f * x[at];
    if (FAULT == MUTATES && last) x[at] = 0.f;
    if (FAULT == WRONG_ELEMENT && last) y[at] += SLIP;
    if (FAULT == USES_WORKSPACE) y[at] += scratch[at];  // as if it had been zeroed
}
