/*
 * sample_finish.cu - the last of sample.cu's kernels: filters, their draw, top logprobs.
 *
 *   grid     a block a row, 1024 threads; rows that are done leave at once
 *   memory   SORT_MAX keys, a histogram, SEGMENT doubles
 *   roles    all: sorting the first tokens in order as sample_row left them; where those are not
 *            enough, histograms over the row, gathering and sorting the next run; the exact
 *            comparisons; thread 0: sums in order
 *   bound    the sort, a few us; where the first tokens are not enough, all logits twice a run
 */
#include "backend/cuda/sample.cuh"

enum { SORT_MAX = SAMPLE_ORDER, BINS = ORDER_BINS, SEGMENT = 256 };
static_assert(SORT_MAX == FINISH_THREADS, "a thread a key");

struct finish {
    const struct sample_spec *s;
    const float *logits;
    int vocab;
    struct draw top;
    double sum;
    uint64_t noise;
    uint64_t *keys; /* [SORT_MAX] */
    uint32_t *bins; /* [BINS] */
    double *passed; /* [SEGMENT] */
    struct draw *room;
    uint32_t *word; /* [4] */
    __device__ __forceinline__ float x(int32_t id) const
    {
        return logit(*s, logits, id);
    }
    __device__ __forceinline__ uint64_t key(int32_t id) const
    {
        return order_key(x(id), top.score, id);
    }
};

/* Counts of the keys >= from whose bits above `shift + 11` are `prefix`, by the next bits. */
__device__ __forceinline__ void histogram(const struct finish &f, uint64_t from, uint64_t prefix,
                                          int shift, int bits)
{
    for (int i = threadIdx.x; i < BINS; i += FINISH_THREADS)
        f.bins[i] = 0;
    __syncthreads();
    uint32_t mask = (1u << bits) - 1,
             n_last = 0; /* the last bin holds nearly all at first: no atomics for it */
    for (int id = threadIdx.x; id < f.vocab; id += FINISH_THREADS) {
        uint64_t key = f.key(id);
        if (key < from || key >> (shift + bits) != prefix) continue;
        uint32_t bin = (uint32_t)(key >> shift) & mask;
        if (bin == BINS - 1)
            n_last++;
        else
            atomicAdd(f.bins + bin, 1);
    }
    n_last = __reduce_add_sync(FULL_WARP, n_last);
    if ((threadIdx.x & 31) == 0 && n_last) atomicAdd(f.bins + BINS - 1, n_last);
    __syncthreads();
}

/* word[0] = how many of the first bins hold at most SORT_MAX together, word[1] = what they hold. */
__device__ __forceinline__ void count_bins(const struct finish &f)
{
    int lane = threadIdx.x & 31;
    uint32_t a = f.bins[threadIdx.x * 2], b = f.bins[threadIdx.x * 2 + 1], sum = a + b;
    for (int w = 1; w < 32; w *= 2) {
        uint32_t x = __shfl_up_sync(FULL_WARP, sum, w);
        if (lane >= w) sum += x;
    }
    uint32_t *warp_sum = (uint32_t *)f.passed; /* free here */
    if (lane == 31) warp_sum[threadIdx.x / 32] = sum;
    if (threadIdx.x < 2) f.word[threadIdx.x] = 0;
    __syncthreads();
    for (int w = 0; w < (int)threadIdx.x / 32; w++)
        sum += warp_sum[w];
    uint32_t fits = (sum - b <= SORT_MAX) + (sum <= SORT_MAX);
    uint32_t held = sum <= SORT_MAX ? sum : sum - b <= SORT_MAX ? sum - b : 0;
    fits = __reduce_add_sync(FULL_WARP, fits);
    held = __reduce_max_sync(FULL_WARP, held);
    if (lane == 0) {
        atomicAdd(f.word, fits);
        atomicMax(f.word + 1, held);
    }
    __syncthreads();
}

/* The end of a run of keys from `from` on, at most SORT_MAX of them and, unless none is left, at
 * least one. */
__device__ __forceinline__ uint64_t batch_end(const struct finish &f, uint64_t from)
{
    uint64_t prefix = 0;
    int shift = ORDER_SHIFT, bits = 11;
    for (;;) {
        histogram(f, from, prefix, shift, bits);
        count_bins(f);
        uint64_t n = f.word[0];
        bool enough = f.word[1] > 0 || n >= 1u << bits;
        __syncthreads();
        if (enough) return (prefix << bits) + (n < 1u << bits ? n : 1u << bits) << shift;
        prefix = prefix << bits | n;
        bits = shift < 11 ? shift : 11;
        shift -= bits;
    }
}

/* The first n keys in order; the others are the largest there are. */
__device__ __forceinline__ void sort(const struct finish &f, int n)
{
    int all = 2;
    while (all < n)
        all *= 2;
    for (int size = 2; size <= all; size *= 2)
        for (int step = size / 2; step; step /= 2) {
            int i = threadIdx.x, j = i ^ step;
            if (j > i && i < all) {
                uint64_t a = f.keys[i], b = f.keys[j];
                if ((a > b) == ((i & size) == 0)) {
                    f.keys[i] = b;
                    f.keys[j] = a;
                }
            }
            __syncthreads();
        }
}

/* keys = those in [from, to), in order; returns their number. */
__device__ __forceinline__ int gather(const struct finish &f, uint64_t from, uint64_t to)
{
    if (threadIdx.x == 0) f.word[0] = 0;
    f.keys[threadIdx.x] = ~(uint64_t)0;
    __syncthreads();
    for (int id = threadIdx.x; id < f.vocab; id += FINISH_THREADS) {
        uint64_t key = f.key(id);
        if (key >= from && key < to) f.keys[atomicAdd(f.word, 1)] = key;
    }
    __syncthreads();
    int n = (int)f.word[0];
    sort(f, n);
    return n;
}

/* keys = sample_row's. */
__device__ __forceinline__ void take(const struct finish &f, const uint64_t *order, int n)
{
    f.keys[threadIdx.x] = (int)threadIdx.x < n ? order[threadIdx.x] : ~(uint64_t)0;
    __syncthreads();
    sort(f, n);
}

/* sample.c, draw_sorted, over keys[0 .. n) of ranks `rank` ...; passed: the weight before them,
 * in thread 0. False: a filter has ended it. */
__device__ __forceinline__ bool draw_batch(const struct finish &f, int n, int rank, double *passed,
                                           struct draw *best)
{
    const struct sample_spec &s = *f.s;
    int i = threadIdx.x, k = s.top_k > 0 && s.top_k < f.vocab ? s.top_k : f.vocab;
    for (int at = 0; at < n; at += SEGMENT) {
        int count = min(min(n - at, (int)SEGMENT), k - rank - at);
        if (count <= 0) return false;
        int32_t id = i < count ? key_id(f.keys[at + i]) : 0;
        float x = f.x(id);
        float e = exp_cpu<true>(__fsub_rn(x, f.top.score));
        if (i < count) f.passed[i] = (double)e;
        if (i == 0) f.word[2] = (uint32_t)count;
        __syncthreads();
        for (int j = 0; i == 0 && j < count; j++) {
            double e_j = f.passed[j];
            f.passed[j] = *passed;
            *passed = __dadd_rn(*passed, e_j);
        }
        __syncthreads();
        if (i < count && rank + at + i > 0 &&
            (__ddiv_rn(f.passed[i], f.sum) > (double)s.top_p || e < s.min_p))
            atomicMin(f.word + 2, (uint32_t)i);
        __syncthreads();
        int kept = (int)f.word[2];
        __syncthreads();
        if (i < kept && x != MINUS_INF)
            *best = better(*best, {__fadd_rn(x, gumbel(noise_bits(f.noise, id))), id});
        if (kept < count) return false;
    }
    return rank + n < k;
}

__device__ __forceinline__ float logprob(const struct finish &f, int32_t id)
{
    return id < 0 || id >= f.vocab ? -3.0e38f : logprob_of(f.x(id), f.top.score, f.sum);
}

/* Tokens in order as long as the draw or the list of top logprobs wants more. */
__device__ __forceinline__ struct draw walk(const struct finish &f, const struct sample_state &st,
                                            const uint64_t *order, struct sample_result *r,
                                            bool drawing, int n_top)
{
    struct draw best = {0.0f, -1};
    double passed = 0.0;
    uint64_t from = 0;
    for (int rank = 0, n; (drawing || rank < n_top) && rank < f.vocab; rank += n) {
        uint64_t to = st.end;
        if (rank == 0 && st.n_order > 0) {
            n = st.n_order;
            take(f, order, n);
        } else {
            to = batch_end(f, from);
            n = gather(f, from, to);
        }
        if (n == 0) break;
        if (threadIdx.x < n && rank + (int)threadIdx.x < n_top) {
            int32_t id = key_id(f.keys[threadIdx.x]);
            r->top_ids[rank + threadIdx.x] = id;
            r->top_logprobs[rank + threadIdx.x] = logprob(f, id);
        }
        if (drawing) drawing = draw_batch(f, n, rank, &passed, &best);
        from = to;
        __syncthreads();
    }
    return block_best<FINISH_THREADS>(best, f.room);
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
    sample_finish(const __grid_constant__ struct sample_args a)
{
    __shared__ uint64_t keys[SORT_MAX];
    __shared__ uint32_t bins[BINS], word[4];
    __shared__ double passed[SEGMENT];
    __shared__ struct draw room[FINISH_THREADS / 32];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const struct sample_spec &s = a.specs[blockIdx.x];
    const struct sample_state st = a.states[blockIdx.x];
    if (!wants_order(s, a.vocab) || !st.finite) return; /* sample_row has done it */
    struct sample_result *r = a.out + blockIdx.x;
    int n_top = min(min(s.n_top, SAMPLE_TOP_MAX), a.vocab);
    struct finish f = {&s,      a.logits + blockIdx.x * a.ld,
                       a.vocab, {st.max, st.arg},
                       st.sum,  noise_key(s),
                       keys,    bins,
                       passed,  room,
                       word};
    bool drawing = f.sum > 0.0 && drawn_in_order(s, a.vocab);
    struct draw best = walk(f, st, a.order + (size_t)blockIdx.x * SAMPLE_ORDER, r, drawing, n_top);
    if (threadIdx.x != 0) return;
    int32_t id = scored(s) ? s.target : drawing ? max(best.id, 0) : st.arg;
    r->id = id;
    r->logprob = logprob(f, id);
    r->finite = 1;
    r->n_top = n_top;
    if (a.next_ids) a.next_ids[blockIdx.x] = id;
}
