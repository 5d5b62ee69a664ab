// y[row][i] = activated((x[row][i] - mean) / sqrt(variance + epsilon) * weight + bias), a row per group of an image
// (NCHW)
//
// Rows are too long for the SMs, but some of them fit L2. Persistent CTAs take shares of rows by ticket: the moments of
// one row, and in turn with them the results of the row `lag` before, whose elements L2 still holds. So DRAM reads and
// writes each element once, both at the same time. The CTA that completes a row's moments merges them, in a fixed
// order.
//
// A CTA waits only for shares with smaller tickets, which running CTAs have taken: this needs no cooperative launch.
//
// Limiter: memory. Rung: `streamed`. Read held.cuh (a CTA's registers), group_norm.cuh (groups of a CTA).
#include "group_norm/held.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int BLOCKS_PER_SM = 5;  // blocks_per_sm
#endif

constexpr int SHARE = PACKS * THREADS;  // packs

// Work of a ticket.
struct Task {
    u32 row, share;
    bool normalizes;

    // First the moments of `lag` rows, then moments and results in turn, then the results of the last `lag` rows.
    __device__ __forceinline__ Task(u32 ticket, u32 rows, u32 shares, u32 lag) {
        const u32 ahead = lag * shares, both = 2 * (rows - lag) * shares;
        const bool is_first = ticket < ahead, is_last = ticket >= ahead + both;
        const u32 in_turn = is_first ? ticket : is_last ? ticket - ahead - both : (ticket - ahead) / 2;
        row = in_turn / shares, share = in_turn - row * shares;
        normalizes = is_last || (!is_first && (ticket - ahead) % 2);
        if (is_last) row += rows - lag;
        if (!is_first && !is_last && !normalizes) row += lag;
    }
};

// Counters, all 0 between launches: tickets, and per row the shares measured, a flag for its statistic, and the shares
// normalized. Only data that one CTA publishes for another has fences: each waits for the thread's stores to reach L2.
struct Meeting {
    u32* const row;

    __device__ __forceinline__ Meeting(u32* counters, u32 row) : row(counters + 1 + 3 * row) {}
    // The last of `blocks` calls resets the count.
    __device__ __forceinline__ static u32 count(u32* counter, u32 blocks) { return atomicInc(counter, blocks - 1); }
    __device__ __forceinline__ bool is_last_measured(u32 shares) const { return take_ticket(row, shares) == shares - 1; }
    __device__ __forceinline__ void set_ready() const {
        __threadfence();
        atomicExch(row + 1, 1u);
    }
    __device__ __forceinline__ void wait_ready() const {
        while (atomicAdd(row + 1, 0u) == 0u) __nanosleep(100);
        __threadfence();
    }
    __device__ __forceinline__ void leave(u32 shares) const {
        if (count(row + 2, shares) == shares - 1) atomicExch(row + 1, 0u);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    group_norm_streamed(const Element* x, const Parameter* weight, const Parameter* bias, Result* y, u32* counters,
                        float2* partial, float2* ready, int rows, int pixels, int shares, int lag, float epsilon,
                        float* mean, float* rstd) {
    __shared__ u32 next;
    __shared__ bool is_last;
    __shared__ Statistic statistic;
    wait_for_previous_launch();
    const u32 tasks = 2u * rows * shares, takes = tasks + gridDim.x;  // every CTA takes one ticket too many
    if (threadIdx.x == 0) next = Meeting::count(counters, takes);
    __syncthreads();
    u32 ticket = next;
    while (ticket < tasks) {
        u32 following = 0;  // the next ticket is in flight meanwhile
        if (threadIdx.x == 0) following = Meeting::count(counters, takes);
        const Task task(ticket, rows, shares, lag);
        const Meeting meeting(counters, task.row);
        const int begin = task.share * SHARE, here = min(SHARE, pixels - begin);
        const long long first = (1LL * task.row * pixels + begin) * VECTOR;
        const Held held(x + first, here, VECTOR);
        if (task.normalizes) {
            if (threadIdx.x == 0) {
                meeting.wait_ready();
                const float2 found = __ldcg(ready + task.row);
                statistic = {found.x, found.y};
            }
            __syncthreads();
            const Channels channels(&statistic, held.pack, 0, weight, bias);
            held.store<true>(y + first, VECTOR, channels, Planes(task.row, weight, bias), begin);
            if (threadIdx.x == 0) meeting.leave(shares);
        } else {
            Part part[UNITS];
            held.measure(part);
            const Moments mine =
                block_merged<THREADS>({static_cast<float>(held.mine * VECTOR), part[0].mean, part[0].squares});
            float2* const of_row = partial + 1LL * task.row * shares;
            if (threadIdx.x == 0) {
                __stcg(of_row + task.share, make_float2(mine.mean, mine.squares));
                is_last = meeting.is_last_measured(shares);
            }
            __syncthreads();
            if (is_last) {
                Moments all{};
                for (int share = threadIdx.x; share < shares; share += THREADS) {
                    const float2 found = __ldcg(of_row + share);
                    const int count = min(SHARE, pixels - share * SHARE) * VECTOR;
                    all = merged(all, {static_cast<float>(count), found.x, found.y});
                }
                all = block_merged<THREADS>(all);
                if (threadIdx.x == 0) {
                    const Statistic found = statistic_of(all, epsilon);
                    Statistics{mean, rstd}.write(task.row, 0, found);
                    __stcg(ready + task.row, make_float2(found.mean, found.scale));
                    meeting.set_ready();
                }
            }
        }
        if (threadIdx.x == 0) next = following;
        __syncthreads();
        ticket = next;
    }
}
