/*
 * sample_row.cu - a row of logits, read once: maximum, sum, the draw from all ids, the first tokens
 * in order.
 *
 *   grid     (SAMPLE_CLUSTER, rows): a cluster a row, each block an equal share of its parts of
 *            4,096 logits; two blocks a multiprocessor up to 196,608 logits a row
 *   memory   the block's logits, then exp(x - max) in their place
 *   roles    all: divide by the temperature; maximum, its first place, what is not finite; exp, and
 *            the draw; a warp a part: its sum by 16 lanes; block 0: the parts' sums in order, the
 *            result
 *   order    (top logprobs, top_k, top_p) a histogram of 1/16 nat below the maximum over the
 *            cluster, then the keys above a bin, as many as the row may need, to `order`;
 *            sample_finish sorts them
 *   bound    bytes: 4 a logit.  A logit is some 22 instructions, a drawn one 46: 1.0 and 2.1 times
 *            the time of its bytes where a chip is full.
 */
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/sample.cuh"

enum {
    BLOCKS = SAMPLE_CLUSTER,
    PARTS_MAX = SAMPLE_VOCAB_MAX / PART / BLOCKS, /* of a block */
    COARSE = 512,                                 /* bins, of 4 of order_key's */
    COARSE_SHIFT = ORDER_SHIFT + 2,
    CHAIN = 16, /* links of a lane's chain whose elements are loaded at once */
};
static_assert(COARSE == ROW_THREADS && COARSE << 2 == ORDER_BINS, "a thread a bin");
static_assert(PARTS_MAX <= ROW_THREADS / 32, "a warp a part");

/* What a block knows of its logits: best and its place, how many are -inf, NaN or +inf. */
struct found {
    struct draw best;
    int32_t n_low, n_bad;
};

struct shared {
    struct found found[BLOCKS];     /* by each block of the cluster */
    float sums[BLOCKS * PARTS_MAX]; /* in block 0: of the parts */
    float drawn[BLOCKS][2];         /* in block 0: score, id */
    struct draw room[ROW_THREADS / 32];
    struct draw bound; /* the draw of the maximum */
    uint32_t bins[COARSE];
    uint32_t warp_sum[ROW_THREADS / 32];
    uint32_t n_order, before, next; /* keys of the row, of blocks below, of this block */
    int32_t n[2];
    uint64_t full;
};

struct row {
    const struct sample_args &a;
    const struct sample_spec &s;
    struct shared &m;
    float *x;                     /* this block's, in shared memory */
    int rank, first, n, n_padded; /* ids [first, first + n); whole parts of x */
    struct draw top;

    __device__ __forceinline__ const float *logits(void) const
    {
        return a.logits + blockIdx.y * a.ld;
    }

    /* Queue the copy; what it does not fill is -inf. */
    __device__ __forceinline__ void fetch(void)
    {
        const float *from = logits() + first;
        int whole = n / 4 * 4;
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(smem_addr(&m.full), whole * 4);
            for (int i = 0; i < whole; i += PART)
                cp_async_bulk(smem_addr(x + i), from + i, min(whole - i, (int)PART) * 4,
                              smem_addr(&m.full));
        }
        for (int i = whole + threadIdx.x; i < n_padded; i += ROW_THREADS)
            x[i] = i < n ? from[i] : MINUS_INF;
        mbarrier_wait(smem_addr(&m.full), 0);
        __syncthreads();
    }

    /* -inf and others that are not finite, among this thread's. */
    __device__ __forceinline__ void count_bad(void)
    {
        for (int i = threadIdx.x * 4; i < n; i += ROW_THREADS * 4)
            for (int at = i; at < min(i + 4, n); at++)
                if (!isfinite(x[at])) atomicAdd(&m.n[x[at] != MINUS_INF], 1);
    }

    /* The first place of `most` among this thread's. */
    __device__ __forceinline__ int place_of(float most)
    {
        for (int i = threadIdx.x * 4; i < n; i += ROW_THREADS * 4)
            for (int at = i; at < min(i + 4, n); at++)
                if (x[at] == most) return first + at;
        return -1;
    }

    /* Divides in place; returns this thread's maximum. */
    __device__ __forceinline__ float scan_own(void)
    {
        float most = MINUS_INF;
        uint32_t size = 0; /* of the largest as a number: not below infinity's if not finite */
        for (int i = threadIdx.x * 4; i < n; i += ROW_THREADS * 4) {
            float4 f = *(const float4 *)(x + i);
            most = fmaxf(most, fmaxf(fmaxf(f.x, f.y), fmaxf(f.z, f.w)));
            size = max(
                max(size, __float_as_uint(f.x) & 0x7fffffffu),
                max(__float_as_uint(f.y) & 0x7fffffffu,
                    max(__float_as_uint(f.z) & 0x7fffffffu, __float_as_uint(f.w) & 0x7fffffffu)));
        }
        if (size >= 0x7f800000u) count_bad();
        if (!scaled(s)) return most;
        for (int i = threadIdx.x * 4; i < n; i += ROW_THREADS * 4) {
            float4 f = *(const float4 *)(x + i);
            *(float4 *)(x + i) =
                make_float4(__fdiv_rn(f.x, s.temperature), __fdiv_rn(f.y, s.temperature),
                            __fdiv_rn(f.z, s.temperature), __fdiv_rn(f.w, s.temperature));
        }
        return __fdiv_rn(most, s.temperature); /* division keeps the order */
    }

    /* Divides in place; top, and whether the logits as they came were all finite. */
    __device__ __forceinline__ bool scan(void)
    {
        float most = scan_own();
        struct draw best = block_best<ROW_THREADS>({most, n > 0 ? 0 : -1}, m.room);
        int place = n > 0 && most == best.score ? place_of(most) : -1;
        best = block_best<ROW_THREADS>({most, place}, m.room);
        __syncthreads();
        barrier_cluster_wait(); /* all blocks run */
        if (threadIdx.x < BLOCKS) {
            float v[4] = {best.score, __int_as_float(best.id), __int_as_float(m.n[0]),
                          __int_as_float(m.n[1])};
            st_shared_cluster_v4(mapa_shared_cluster(smem_addr(&m.found[rank]), threadIdx.x), v);
        }
        barrier_cluster_arrive();
        barrier_cluster_wait();
        top = {0.0f, -1};
        int n_low = 0, n_bad = 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            top = better(top, m.found[b].best);
            n_low += m.found[b].n_low;
            n_bad += m.found[b].n_bad;
        }
        const int32_t *lowered = a.lowered + blockIdx.y * 2;
        return n_bad + lowered[1] == 0 && n_low == lowered[0];
    }

    /* The end of the keys that go to `order`: at least those that the row is sure to want, if there
     * are no more than fit; 0: none. */
    __device__ __forceinline__ uint64_t order_end(void)
    {
        int lane = threadIdx.x & 31, bin = threadIdx.x;
        uint32_t all = 0, below = 0, want = max(s.n_top, 1);
        if (drawn_in_order(s, a.vocab))
            want = max((int)want, s.top_k > 0 ? min(s.top_k, SAMPLE_ORDER) : SAMPLE_ORDER);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            uint32_t c = ld_shared_cluster_u32(mapa_shared_cluster(smem_addr(&m.bins[bin]), b));
            all += c;
            if (b < rank) below += c;
        }
        uint32_t sum = all;
        for (int w = 1; w < 32; w *= 2) {
            uint32_t c = __shfl_up_sync(FULL_WARP, sum, w);
            if (lane >= w) sum += c;
        }
        if (lane == 31) m.warp_sum[bin / 32] = sum;
        __syncthreads();
        for (int w = 0; w < bin / 32; w++)
            sum += m.warp_sum[w];
        int fit = __syncthreads_count(sum <= SAMPLE_ORDER),
            enough = __syncthreads_count(sum < want) + 1;
        int bins = min(min(fit, enough), COARSE - 1);
        if (bin == bins - 1) m.n_order = sum;
        below = __reduce_add_sync(FULL_WARP, bin < bins ? below : 0);
        if (lane == 0 && below) atomicAdd(&m.before, below);
        __syncthreads();
        return (uint64_t)bins << COARSE_SHIFT;
    }

    /* The first keys, in no order; returns their end. */
    __device__ __forceinline__ uint64_t order(void)
    {
        for (int i = threadIdx.x; i < n; i += ROW_THREADS) {
            uint32_t bin = (uint32_t)(order_key(x[i], top.score, first + i) >> COARSE_SHIFT);
            if (bin < COARSE - 1) atomicAdd(&m.bins[bin], 1);
        }
        barrier_cluster_arrive();
        barrier_cluster_wait();
        uint64_t end = order_end(), *to = a.order + (size_t)blockIdx.y * SAMPLE_ORDER;
        for (int i = threadIdx.x; i < n; i += ROW_THREADS) {
            uint64_t key = order_key(x[i], top.score, first + i);
            if (key < end) to[m.before + atomicAdd(&m.next, 1)] = key;
        }
        __syncthreads(); /* x is overwritten next */
        return end;
    }

    /*
     * x = exp(x - max).  DRAW: returns the best draw of ids with exp(x - max) >= min_p; `top` is
     * the row's maximum and bounds the search: to beat its score B an id needs -log(u) <= exp(x -
     * B), and 1 - u <= -log(u); both sides with room for rounding.  That leaves a handful of ids
     * for the double logarithms.
     */
    template <bool DRAW>
    __device__ __forceinline__ struct draw measure(uint64_t key)
    {
        struct draw best = m.bound;
        float reach = DRAW ? __expf(top.score - best.score + 1e-3f + 4e-7f * fabsf(top.score) +
                                    4e-7f * fabsf(best.score))
                           : 0.0f;
        uint64_t able = 0; /* bit i: this thread's logit i may win */
        static_assert(PARTS_MAX * PART / ROW_THREADS <= 64, "a bit a logit");
        for (int i = threadIdx.x * 4, bit = 0; i < n_padded; i += ROW_THREADS * 4, bit += 4) {
            float4 f = *(const float4 *)(x + i);
            float v[4] = {f.x, f.y, f.z, f.w}, p[4];
            uint64_t at = noise_place(key, first + i);
            uint32_t here = 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[e] = exp_cpu<true>(__fsub_rn(v[e], top.score));
                if (!DRAW) continue;
                uint32_t bits = (uint32_t)(mix(at + e * NOISE_STEP) >> 32);
                float least = __uint_as_float(~bits >> 9 | 0x3f800000u) - 1.0f; /* of 1 - u */
                if (least <= p[e] * reach + 0x1p-30f && p[e] >= s.min_p) here |= 1u << e;
            }
            able |= (uint64_t)here << bit;
            *(float4 *)(x + i) = make_float4(p[0], p[1], p[2], p[3]);
        }
        for (; able; able &= able - 1) {
            int bit = __ffsll((long long)able) - 1;
            int id = first + (bit / 4 * ROW_THREADS + threadIdx.x) * 4 + bit % 4;
            float v = id < a.vocab ? logit(s, logits(), id) : MINUS_INF;
            if (v != MINUS_INF)
                best = better(best, {__fadd_rn(v, gumbel(noise_bits(key, id))), id});
        }
        return best;
    }

    /* kernels.inc, exp_sum: each part by a warp, to block 0. */
    __device__ __forceinline__ void add_parts(void)
    {
        int part = threadIdx.x / 32, lane = threadIdx.x & 31;
        if (part * PART >= n_padded) return;
        const float *e = x + part * PART + (lane & 15);
        float acc = 0.0f, next[CHAIN];
#pragma unroll
        for (int i = 0; i < CHAIN; i++)
            next[i] = e[i * 16];
        for (int i0 = 0; i0 < PART; i0 += CHAIN * 16) {
            float now[CHAIN];
#pragma unroll
            for (int i = 0; i < CHAIN; i++)
                now[i] = next[i];
            if (i0 + CHAIN * 16 < PART)
#pragma unroll
                for (int i = 0; i < CHAIN; i++)
                    next[i] = e[i0 + (CHAIN + i) * 16];
#pragma unroll
            for (int i = 0; i < CHAIN; i++)
                acc = __fadd_rn(acc, now[i]);
        }
        acc = lanes_sum(acc);
        if (lane == 0)
            st_shared_cluster_u32(mapa_shared_cluster(smem_addr(&m.sums[first / PART + part]), 0),
                                  __float_as_uint(acc));
    }

    /* Block 0, its first warp. */
    __device__ __forceinline__ void result(bool finite, bool drawing, uint64_t end)
    {
        int n_parts = (a.vocab + PART - 1) / PART, lane = threadIdx.x & 31;
        bool whole = finite && isfinite(top.score);
        double sum = 0.0;
        for (int i = 0; i < n_parts && whole; i++)
            sum = __dadd_rn(sum, (double)m.sums[i]);
        if (lane != 0) return;
        if (finite && wants_order(s, a.vocab)) {
            a.states[blockIdx.y] = {sum, end, top.score, top.id, 1, end ? (int32_t)m.n_order : 0};
            return;
        }
        struct draw best = {0.0f, -1};
        if (whole && drawing)
            for (int b = 0; b < BLOCKS; b++)
                best = better(best, {m.drawn[b][0], __float_as_int(m.drawn[b][1])});
        int32_t id = !finite                    ? 0
                     : scored(s)                ? s.target
                     : !drawing || !(sum > 0.0) ? top.id
                                                : max(best.id, 0);
        struct sample_result *r = a.out + blockIdx.y;
        r->id = id;
        r->logprob =
            finite && id < a.vocab ? logprob_of(logit(s, logits(), id), top.score, sum) : -3.0e38f;
        r->finite = finite;
        r->n_top = 0;
        if (a.next_ids) a.next_ids[blockIdx.y] = id;
        a.states[blockIdx.y].finite = 0; /* nothing is left to do */
    }
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2)
    sample_row(const __grid_constant__ struct sample_args a)
{
    extern __shared__ __align__(128) float x[];
    __shared__ struct shared m;
    griddepcontrol_launch_dependents();
    barrier_cluster_arrive();
    int n_parts = (a.vocab + PART - 1) / PART, share = (n_parts + BLOCKS - 1) / BLOCKS;
    int rank = cluster_ctarank(), part0 = min(rank * share, n_parts),
        mine = min(share, n_parts - part0);
    m.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        m.n[0] = m.n[1] = 0;
        m.n_order = m.before = m.next = 0;
        m.bound = {0.0f, -1};
        mbarrier_init(smem_addr(&m.full), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    struct row r = {a,
                    a.specs[blockIdx.y],
                    m,
                    x,
                    rank,
                    part0 * PART,
                    max(0, min(mine * PART, a.vocab - part0 * PART)),
                    mine * PART,
                    {0.0f, -1}};
    r.fetch();
    bool finite = r.scan(), drawing = drawn_from_all(r.s, a.vocab);
    bool whole = finite && isfinite(r.top.score); /* else there is nothing to measure */
    uint64_t end = 0, key = noise_key(r.s);
    if (whole && wants_order(r.s, a.vocab)) end = r.order();
    if (whole && drawing) {
        if (threadIdx.x == 0)
            m.bound = {__fadd_rn(r.top.score, gumbel(noise_bits(key, r.top.id))), r.top.id};
        __syncthreads();
        struct draw best = block_best<ROW_THREADS>(r.measure<true>(key), m.room);
        if (threadIdx.x == 0)
            st_shared_cluster_v2(mapa_shared_cluster(smem_addr(m.drawn[rank]), 0), best.score,
                                 __int_as_float(best.id));
    } else if (whole) {
        r.measure<false>(0);
    }
    __syncthreads();
    if (whole) r.add_parts();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (rank == 0 && threadIdx.x < 32) r.result(finite, drawing, end);
}
