// y[p.row][r][c] = sum over lines of weight * (sum over columns of weight * p.pixels) for every photograph p
//
// Resizes and crops photographs of any size, [3][height][width] each, to [side][side][3] in one launch, bit-exact with
// Pillow: along one axis, then the other, with a triangle filter that widens when downscaling, 22-bit weights and 8
// bits in between. One CTA per tile of a square. Two of its warps compute the weights of the tile's columns and rows,
// in double precision as Pillow does; then each thread computes one pixel at a time from its whole window. That takes
// about twice the products of a separable pass with stored intermediate sums, but no memory for them. Limiter:
// single-byte loads, which the lanes of a warp find in the same sectors.
//
// Not part of a ladder: escalade_apps/classify/resizing.py launches it.

constexpr int TILE = 32;  // pixels across, one per lane, and down
constexpr int WARPS = 8;
constexpr int BITS = 22;
constexpr int HALF = 1 << (BITS - 1);

struct Photograph {
    const unsigned char* pixels;
    int width, height;
    int row;
    int down_first;       // sum lines before columns
    double left, top;     // origin of the square in the photograph
    double across, down;  // photograph pixels per pixel of the square
};

struct Window {
    int first, count;
};

// Weights of one pixel along an axis, TILE apart, and the start of their window in the photograph. Products are rounded
// before they are added to anything, as in Pillow.
__device__ Window weigh(int pixel, double begin, double scale, int size, int* weights) {
    const double reach = scale > 1. ? scale : 1., inverse = 1. / reach;
    const double centre = begin + __dmul_rn(pixel + .5, scale);
    const int first = max(int(centre - reach + .5), 0);
    const int count = min(int(centre + reach + .5), size) - first;
    const auto triangle = [=](int tap) {
        const double distance = fabs(__dmul_rn(first + tap - centre + .5, inverse));
        return distance < 1. ? 1. - distance : 0.;
    };
    double sum = 0.;
    for (int tap = 0; tap < count; ++tap) sum += triangle(tap);
    for (int tap = 0; tap < count; ++tap) weights[tap * TILE] = int(triangle(tap) / sum * (1 << BITS) + .5);
    return {first, count};
}

// One axis of a pixel's window: its weights, and the distance between the bytes they apply to.
struct Axis {
    const int* weights;
    int count;
    int step;
};

// High byte of a sum that includes HALF. Weights are positive and sum to 1 up to rounding: it never overflows.
__device__ int byte_of(int sum) { return sum >> BITS; }

extern "C" __global__ void __launch_bounds__(TILE * WARPS)
    classify_resize(const Photograph* photographs, unsigned char* y, int side, int taps) {
    extern __shared__ int weights[];  // of the columns, then of the rows, [taps][TILE] each
    __shared__ Window windows[2][TILE];
    const Photograph photograph = photographs[blockIdx.z];
    const int lane = threadIdx.x, warp = threadIdx.y, top = blockIdx.y * TILE;
    const int column = blockIdx.x * TILE + lane;
    int *const across = weights + lane, *const down = weights + taps * TILE;
    if (warp == 0 && column < side)
        windows[0][lane] = weigh(column, photograph.left, photograph.across, photograph.width, across);
    if (warp == 1 && top + lane < side)
        windows[1][lane] = weigh(top + lane, photograph.top, photograph.down, photograph.height, down + lane);
    __syncthreads();
    if (column >= side) return;

    const long long plane = 1LL * photograph.width * photograph.height;
    const Window columns = windows[0][lane];
    for (int row = warp; row < TILE && top + row < side; row += WARPS) {
        const Window lines = windows[1][row];
        const Axis over_columns = {across, columns.count, 1};
        const Axis over_lines = {down + row, lines.count, photograph.width};
        const Axis inner = photograph.down_first ? over_lines : over_columns;
        const Axis outer = photograph.down_first ? over_columns : over_lines;
        const unsigned char* from = photograph.pixels + 1LL * lines.first * photograph.width + columns.first;
        int red = HALF, green = HALF, blue = HALF;
        for (int i = 0; i < outer.count; ++i, from += outer.step) {
            int inner_red = HALF, inner_green = HALF, inner_blue = HALF;
            const unsigned char* at = from;
            for (int j = 0; j < inner.count; ++j, at += inner.step) {
                const int weight = inner.weights[j * TILE];
                inner_red += weight * __ldg(at);
                inner_green += weight * __ldg(at + plane);
                inner_blue += weight * __ldg(at + 2 * plane);
            }
            const int weight = outer.weights[i * TILE];
            red += weight * byte_of(inner_red);
            green += weight * byte_of(inner_green);
            blue += weight * byte_of(inner_blue);
        }
        unsigned char* const to = y + 3 * ((1LL * photograph.row * side + top + row) * side + column);
        to[0] = byte_of(red);
        to[1] = byte_of(green);
        to[2] = byte_of(blue);
    }
}
