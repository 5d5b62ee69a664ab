// y[p.row][r][c] = sum over lines of weight * (sum over columns of weight * p.pixels) for every photograph p
//
// Photographs of any sizes, [3][height][width] each, resized and cropped to [side][side][3] in one launch, to the bit as
// Pillow does it: along one axis and then along the other, by a triangle that widens as pixels get fewer, with weights
// of 22 bits and 8 bits between the two. A block has a tile of one square. Two of its warps find the weights of the
// tile's columns and rows, in double precision as Pillow does; then a thread has a pixel at a time and sums all of its
// window. That is about twice the products of sums along one axis that are kept for the other, and needs no room for
// them. What bounds it: loads of single bytes, which the lanes of a warp find in the same sectors.
//
// No ladder has it: escalade_apps/classify/resizing.py launches it.

constexpr int TILE = 32;  // pixels across, a lane each, and down
constexpr int WARPS = 8;
constexpr int BITS = 22;
constexpr int HALF = 1 << (BITS - 1);

struct Photograph {
    const unsigned char* pixels;
    int width, height;
    int row;
    int down_first;       // whether lines are summed before columns
    double left, top;     // where the square begins in the photograph
    double across, down;  // the photograph's pixels for one of the square
};

struct Window {
    int first, count;
};

// The weights of one pixel along an axis, each TILE behind the last, and where in the photograph they begin. Products
// are rounded before they are added to anything, as Pillow's are.
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

// One axis of a pixel's window: its weights, and how far apart the bytes are that they are for.
struct Axis {
    const int* weights;
    int count;
    int step;
};

// A byte of a sum with HALF in it. Weights are positive, and off a sum of 1 by their rounding alone: it never overflows.
__device__ int byte_of(int sum) { return sum >> BITS; }

extern "C" __global__ void __launch_bounds__(TILE * WARPS)
    classify_resize(const Photograph* photographs, unsigned char* y, int side, int taps) {
    extern __shared__ int weights[];  // of the columns and of the rows, [taps][TILE] each
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
