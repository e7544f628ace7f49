/*
 * attn.cu - paged attention for few query columns (decode, and prefill where attn_prefill.cu has no kernel).
 *
 * A column is one query head of one token; a block's columns share a KV head, so its keys are the 16 rows
 * of mma.sync m16n8k16 and the columns its n8 side.  An item is one chunk of one KV head of one block.
 *
 *   grid     one persistent block a multiprocessor; each takes an equal run of consecutive items
 *   roles    warps 0-7: arithmetic; warp 8: copies K and V stages ahead, also across items
 *   memory   ring of stages (4 tiles = 64 keys of K or V, one bulk copy a tile, full and empty mbarriers);
 *            q and P as B fragments; per column: 8 warp maxima, maximum, fold factors, row sum
 *   a chunk  scores: warps 0-3 take the even stages, 4-7 the odd ones, a tile each; maximum over warps;
 *            P to shared memory; output: each warp owns 16 of head_dim (or 2 x 16) and walks all keys in
 *            order; one warp an n8 block sums P by lanes while it reads it; fold in registers
 *   pairs    (block, KV head) that lie in one run are finished in registers; those cut by the border of
 *            a run leave (m, l, O) a chunk in `partial`, and the last one to arrive folds them in order
 *   bound    bytes of K and V: 4,390 GB/s.  A bf16 chunk of 128 KB is 4 us of one multiprocessor's share
 *            of that; its arithmetic takes under 1 us (one column block).
 */
#include "backend/cuda/attn.cuh"
#include "backend/cuda/fragment.cuh"

enum {
    WARPS = 8,
    THREADS = WARPS * 32 + 32,
    STAGE_TILES = 4,
    CHUNK_TILES = ATTN_CHUNK / KV_ROWS,
};

template <kv_type_t TYPE, int HEAD_DIM, int NT>
struct shape {
    static constexpr int COLS = NT * 8;
    static constexpr int STEPS = HEAD_DIM / 16;               /* k16 steps of the scores, d blocks of the output */
    static constexpr int OWN = (STEPS + WARPS - 1) / WARPS;   /* d blocks a warp */
    static constexpr uint32_t TILE = KV_ROWS * HEAD_DIM * (TYPE == KV_BF16 ? 2 : 1);
    static constexpr uint32_t STAGE = TILE * STAGE_TILES;
    static constexpr uint32_t Q_BYTES = STEPS * NT * 32 * 8;
    static constexpr uint32_t P_BYTES = CHUNK_TILES * NT * 32 * 8;
    static constexpr int STAGES = ATTN_STAGES(TYPE, HEAD_DIM, NT);
    static_assert(STAGE == ATTN_STAGE_BYTES(TYPE, HEAD_DIM), "kernels.h");
    static_assert(Q_BYTES + P_BYTES + COLS * 4 * (WARPS + 7) + ATTN_STAGES_MAX * 16 == ATTN_FIXED_BYTES(HEAD_DIM, NT),
                  "kernels.h");
    static_assert(STAGES >= 4, "ring");
};

/* Shared memory, in this order. */
template <class S>
struct map {
    uint32_t stages, full, empty;
    uint2 *q, *p;
    float *warp_max, *max, *old, *fresh, *row_sum, *total;
    int32_t *kind, *pos;
    __device__ __forceinline__ map(char *smem)
    {
        stages = smem_addr(smem);
        q = (uint2 *)(smem + S::STAGES * S::STAGE);
        p = q + S::Q_BYTES / 8;
        warp_max = (float *)(p + S::P_BYTES / 8);
        max = warp_max + WARPS * S::COLS;
        old = max + S::COLS;
        fresh = old + S::COLS;
        row_sum = fresh + S::COLS;
        total = row_sum + S::COLS;
        kind = (int32_t *)(total + S::COLS);
        pos = kind + S::COLS;
        full = smem_addr(pos + S::COLS);
        empty = full + ATTN_STAGES_MAX * 8;
    }
};

/* Position of the ring: stage and the phase of its barriers. */
template <int STAGES>
struct ring {
    int stage;
    uint32_t phase;
    __device__ __forceinline__ void next(void)
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* A walk over items. */
struct cursor {
    int block, head, chunk, n_chunks;
    struct attn_span span;
    __device__ __forceinline__ void load(const struct attn_args &a)
    {
        span = a.spans[block];
        n_chunks = chunk_count(span.n_keys, a.first_chunk);
    }
    __device__ __forceinline__ void find(const struct attn_args &a, int item)
    {
        int lo = 0, hi = a.n_blocks; /* spans[lo].first <= item < spans[hi].first */
        while (hi - lo > 1) {
            int mid = (lo + hi) / 2;
            if (a.spans[mid].first <= item)
                lo = mid;
            else
                hi = mid;
        }
        block = lo;
        load(a);
        head = (item - span.first) / n_chunks;
        chunk = (item - span.first) % n_chunks;
    }
    __device__ __forceinline__ void next(const struct attn_args &a)
    {
        if (++chunk < n_chunks) return;
        chunk = 0;
        if (++head < a.n_kv_heads) return;
        head = 0;
        n_chunks = 0;
        while (n_chunks == 0 && ++block < a.n_blocks)
            load(a);
    }
};

template <kv_type_t TYPE, int HEAD_DIM, int NT>
__device__ __forceinline__ void produce(const struct attn_args &a, const map<shape<TYPE, HEAD_DIM, NT>> &m, int begin,
                                        int end)
{
    using S = shape<TYPE, HEAD_DIM, NT>;
    int lane = threadIdx.x & 31;
    ring<S::STAGES> r = {0, 1};
    struct cursor at;
    at.find(a, begin);
    for (int item = begin; item < end; item++, at.next(a)) {
        struct chunk c = chunk_at(at.chunk, at.span.n_keys, a.first_chunk);
        int n_tiles = (c.n + KV_ROWS - 1) / KV_ROWS;
        int64_t page = 0;
        if (lane < n_tiles) page = a.tables[at.span.seq * a.table_ld + c.key0 / KV_ROWS + lane];
        for (int is_v = 0; is_v < 2; is_v++) {
            const char *base = (const char *)(is_v ? a.v : a.k);
            for (int t = 0; t < n_tiles; t += STAGE_TILES, r.next()) {
                int n = n_tiles - t < STAGE_TILES ? n_tiles - t : STAGE_TILES;
                int64_t own = __shfl_sync(FULL_WARP, page, t + (lane & (STAGE_TILES - 1)));
                mbarrier_wait(m.empty + r.stage * 8, r.phase);
                if (lane == 0) mbarrier_arrive_expect_tx(m.full + r.stage * 8, n * S::TILE);
                __syncwarp();
                if (lane < n)
                    cp_async_bulk(m.stages + r.stage * S::STAGE + lane * S::TILE,
                                  base + (own * a.n_kv_heads + at.head) * S::TILE, S::TILE, m.full + r.stage * 8);
            }
        }
    }
}

/* One thread's part of the arithmetic: warps 0-7. */
template <kv_type_t TYPE, int HEAD_DIM, int NT>
struct consumer {
    using S = shape<TYPE, HEAD_DIM, NT>;
    const struct attn_args &a;
    const map<S> m;
    ring<S::STAGES> r;
    struct cursor at;
    int warp, lane, g, c2;      /* row of an accumulator, first column of it */
    float o[S::OWN][NT][4];     /* folded output */
    float run_max, run_sum;     /* of column threadIdx.x, in threads below COLS */
    struct fold last;           /* of that column, not yet applied to run_sum */

    __device__ __forceinline__ consumer(const struct attn_args &args, const map<S> &map_)
        : a(args), m(map_), r{0, 0}, warp(threadIdx.x / 32), lane(threadIdx.x & 31), g(lane >> 2), c2((lane & 3) * 2)
    {
    }

    __device__ __forceinline__ void sync(void)
    {
        bar_sync(1, WARPS * 32);
    }

    __device__ __forceinline__ int n_cols(void)
    {
        return at.span.n * a.group;
    }

    __device__ __forceinline__ size_t row_of(int col) /* of q and out, in heads */
    {
        size_t token = at.span.token + col / a.group;
        return token * (a.n_kv_heads * a.group) + at.head * a.group + col % a.group;
    }

    /* q of all columns as B fragments (zeros past the last column), and the columns' positions. */
    __device__ __forceinline__ void load_q(void)
    {
        sync(); /* all have read the last pair's */
        for (int i = threadIdx.x; i < S::STEPS * NT * 32; i += WARPS * 32) {
            int col = i / 32 % NT * 8 + g, step = i / 32 / NT;
            uint2 v = make_uint2(0, 0);
            if (col < n_cols()) {
                const uint16_t *q = a.q + row_of(col) * HEAD_DIM;
                v.x = *(const uint32_t *)(q + q_elem<TYPE>(step, 0));
                v.y = *(const uint32_t *)(q + q_elem<TYPE>(step, 1));
            }
            m.q[i] = v;
        }
        int col = threadIdx.x, first = at.span.n_keys - at.span.n;
        if (col < S::COLS) m.pos[col] = col < n_cols() ? first + col / a.group : at.span.n_keys - 1;
        sync();
    }

    /* s = scaled scores of tile `t`, -inf where the key is none or comes after the column's token. */
    __device__ __forceinline__ void scores(float s[NT][4], uint32_t tile, int key0, int end)
    {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = 0.0f;
        constexpr int HALF = S::STEPS < 8 ? S::STEPS : 8; /* steps whose fragments are held at once */
#pragma unroll
        for (int half = 0; half < S::STEPS; half += HALF) {
            uint32_t k[HALF][4];
#pragma unroll
            for (int i = 0; i < HALF && half + i < S::STEPS; i += 2)
                k_fragments<TYPE>(k + i, tile, (half + i) / 2);
#pragma unroll
            for (int i = 0; i < HALF && half + i < S::STEPS; i++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint2 b = m.q[((half + i) * NT + n) * 32 + lane];
                    uint32_t q[2] = {b.x, b.y};
                    mma_m16n8k16_bf16(s[n], k[i], q);
                }
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = key0 + g + i / 2 * 8, last = m.pos[n * 8 + c2 + i % 2];
                s[n][i] = key < end && key <= last ? __fmul_rn(s[n][i], a.scale) : ATTN_NONE;
            }
    }

    /* The warp's maximum of each column to shared memory. */
    __device__ __forceinline__ void warp_maxima(float s[2][NT][4])
    {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x = fmaxf(fmaxf(s[0][n][i], s[0][n][i + 2]), fmaxf(s[1][n][i], s[1][n][i + 2]));
#pragma unroll
                for (int w = 4; w < 32; w *= 2)
                    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, w));
                if (lane < 4) m.warp_max[warp * S::COLS + n * 8 + c2 + i] = x;
            }
    }

    __device__ __forceinline__ void add_last_sum(int col)
    {
        run_sum = fold_apply(run_sum, m.row_sum[col], last.old, last.fresh, last.kind);
    }

    /* Column threads: the chunk's maximum, the last chunk's sum, the fold factors. */
    __device__ __forceinline__ void column_step(bool first)
    {
        int col = threadIdx.x;
        if (col >= S::COLS) return;
        float mc = m.warp_max[col];
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            mc = fmaxf(mc, m.warp_max[w * S::COLS + col]);
        if (!first) add_last_sum(col);
        last = fold_begin(&run_max, mc, first);
        m.max[col] = mc;
        m.old[col] = last.old;
        m.fresh[col] = last.fresh;
        m.kind[col] = last.kind;
    }

    /* P of one tile as B fragments to shared memory. */
    __device__ __forceinline__ void write_p(float s[NT][4], int tile)
    {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float mc = m.max[n * 8 + c2 + i % 2];
                p[i] = exp_cpu<true>(__fsub_rn(s[n][i], mc == ATTN_NONE ? 0.0f : mc));
            }
            m.p[(tile * NT + n) * 32 + lane] =
                make_uint2(movmatrix_trans(bf16_pack(p[0], p[1])), movmatrix_trans(bf16_pack(p[2], p[3])));
        }
    }

    __device__ __forceinline__ void sum_tile(float sum[4], uint2 p)
    {
        sum[0] = __fadd_rn(sum[0], bf16_lo(p.x)); /* lanes 2c, 2c + 1, 2c + 8, 2c + 9 of column g */
        sum[1] = __fadd_rn(sum[1], bf16_hi(p.x));
        sum[2] = __fadd_rn(sum[2], bf16_lo(p.y));
        sum[3] = __fadd_rn(sum[3], bf16_hi(p.y));
    }

    __device__ __forceinline__ void write_sum(const float sum[4])
    {
        float even = __fadd_rn(sum[0], sum[2]), odd = __fadd_rn(sum[1], sum[3]);
#pragma unroll
        for (int w = 2; w; w /= 2) {
            even = __fadd_rn(even, __shfl_xor_sync(FULL_WARP, even, w));
            odd = __fadd_rn(odd, __shfl_xor_sync(FULL_WARP, odd, w));
        }
        if ((lane & 3) == 0) m.row_sum[warp * 8 + g] = __fadd_rn(even, odd);
    }

    /* acc = P V over the chunk's tiles; the warps below NT also sum their column block's P. */
    __device__ __forceinline__ void output(float acc[S::OWN][NT][4], int n_tiles)
    {
#pragma unroll
        for (int d = 0; d < S::OWN; d++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[d][n][i] = 0.0f;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int t0 = 0; t0 < n_tiles; t0 += STAGE_TILES, r.next()) {
            mbarrier_wait(m.full + r.stage * 8, r.phase);
            uint32_t stage = m.stages + r.stage * S::STAGE;
            int n_here = n_tiles - t0;
#pragma unroll
            for (int d = 0; d < S::OWN; d++) {
                int block = warp + d * WARPS;
                if (block >= S::STEPS) break;
                uint32_t v[STAGE_TILES][4];
                v_fragments<TYPE>(v, stage, S::TILE, block);
                v_fragments<TYPE>(v + 2, stage + 2 * S::TILE, S::TILE, block);
#pragma unroll
                for (int t = 0; t < STAGE_TILES; t++) {
                    if (t >= n_here) break;
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        uint2 b = m.p[((t0 + t) * NT + n) * 32 + lane];
                        uint32_t p[2] = {b.x, b.y};
                        mma_m16n8k16_bf16(acc[d][n], v[t], p);
                    }
                }
            }
            if (warp < NT)
                for (int t = 0; t < STAGE_TILES && t < n_here; t++)
                    sum_tile(sum, m.p[((t0 + t) * NT + warp) * 32 + lane]);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(m.empty + r.stage * 8);
        }
        if (warp < NT) write_sum(sum);
    }

    /* Through the chunk: afterwards acc, m.row_sum and the factors are the chunk's. */
    __device__ __forceinline__ void chunk(float acc[S::OWN][NT][4], bool first)
    {
        struct chunk c = chunk_at(at.chunk, at.span.n_keys, a.first_chunk);
        int n_tiles = (c.n + KV_ROWS - 1) / KV_ROWS, own = warp & (STAGE_TILES - 1);
        float s[2][NT][4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* stage i; warps 0-3 have even ones, 4-7 odd ones */
            bool mine = (i & 1) == warp / STAGE_TILES, there = i * STAGE_TILES < n_tiles;
            int tile = i * STAGE_TILES + own;
            if (there) mbarrier_wait(m.full + r.stage * 8, r.phase);
            if (mine && tile < n_tiles)
                scores(s[i / 2], m.stages + r.stage * S::STAGE + own * S::TILE, c.key0 + tile * KV_ROWS, c.key0 + c.n);
            else if (mine)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        s[i / 2][n][j] = ATTN_NONE;
            if (there) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(m.empty + r.stage * 8);
                r.next();
            }
        }
        warp_maxima(s);
        sync();
        column_step(first);
        sync();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int tile = (i * 2 + warp / STAGE_TILES) * STAGE_TILES + own;
            if (tile < n_tiles) write_p(s[i], tile);
        }
        sync();
        output(acc, n_tiles);
    }

    __device__ __forceinline__ void fold_into(const float acc[S::OWN][NT][4])
    {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int col = n * 8 + c2 + i, kind = m.kind[col];
                float old = m.old[col], fresh = m.fresh[col];
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        o[d][n][h * 2 + i] = fold_apply(o[d][n][h * 2 + i], acc[d][n][h * 2 + i], old, fresh, kind);
            }
    }

    __device__ __forceinline__ uint16_t result(float sum_of_p_v, float sum_of_p)
    {
        float x = __fdiv_rn(sum_of_p_v, sum_of_p);
        return f32_bf16(TYPE == KV_BF16 ? x : __fmul_rn(x, a.v_scale));
    }

    __device__ __forceinline__ void finish(void)
    {
        sync();
        if (threadIdx.x < S::COLS) {
            add_last_sum(threadIdx.x);
            m.total[threadIdx.x] = run_sum;
        }
        sync();
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int col = n * 8 + c2 + i;
                if (col >= n_cols()) continue;
                uint16_t *out = a.out + row_of(col) * HEAD_DIM;
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (warp + d * WARPS < S::STEPS)
                            out[elem_of_row<TYPE>(warp + d * WARPS, h)] = result(o[d][n][h * 2 + i], m.total[col]);
            }
    }

    /* Workspace of chunk `c` of the pair that starts in run `owner`: O [COLS][HEAD_DIM], m, l [COLS]. */
    __device__ __forceinline__ float *slot(int owner, int c)
    {
        return a.partial + ((size_t)owner * a.max_chunks + c) * (S::COLS * (HEAD_DIM + 2));
    }

    __device__ __forceinline__ void leave(const float acc[S::OWN][NT][4], float *to)
    {
        sync(); /* m.row_sum is whole */
        if (threadIdx.x < n_cols()) {
            to[S::COLS * HEAD_DIM + threadIdx.x] = m.max[threadIdx.x];
            to[S::COLS * (HEAD_DIM + 1) + threadIdx.x] = m.row_sum[threadIdx.x];
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int col = n * 8 + c2 + i % 2;
                if (col >= n_cols()) continue;
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
                    if (warp + d * WARPS < S::STEPS)
                        to[col * HEAD_DIM + elem_of_row<TYPE>(warp + d * WARPS, i / 2)] = acc[d][n][i];
            }
    }

    /* All chunks of a cut pair, left to right; one thread an element. */
    __device__ __forceinline__ void fold_slots(int owner)
    {
        for (int i = threadIdx.x; i < n_cols() * HEAD_DIM; i += WARPS * 32) {
            int col = i / HEAD_DIM;
            float top = 0.0f, sum = 0.0f, x = 0.0f;
#pragma unroll 4
            for (int c = 0; c < at.n_chunks; c++) {
                const float *s = slot(owner, c);
                struct fold f = fold_begin(&top, __ldcg(s + S::COLS * HEAD_DIM + col), c == 0);
                sum = fold_apply(sum, __ldcg(s + S::COLS * (HEAD_DIM + 1) + col), f.old, f.fresh, f.kind);
                x = fold_apply(x, __ldcg(s + i), f.old, f.fresh, f.kind);
            }
            a.out[row_of(col) * HEAD_DIM + i % HEAD_DIM] = result(x, sum);
        }
    }

    /* `n` chunks of a cut pair are written; the one that completes it folds. */
    __device__ __forceinline__ void arrive(int owner, int n)
    {
        __threadfence();
        sync();
        if (threadIdx.x == 0) {
            uint32_t *arrived = a.arrived + (size_t)at.block * a.n_kv_heads + at.head;
            bool done = atomicAdd(arrived, (uint32_t)n) + n == at.n_chunks;
            if (done) *arrived = 0;
            m.kind[0] = done;
        }
        sync();
        if (!m.kind[0]) return;
        __threadfence();
        fold_slots(owner);
    }

    __device__ __forceinline__ void run(int begin, int end, int64_t n_items)
    {
        at.find(a, begin);
        int n_left = 0, owner = 0;
        bool whole = false;
        for (int item = begin; item < end; item++, at.next(a)) {
            bool first = at.chunk == 0, final = at.chunk == at.n_chunks - 1;
            float acc[S::OWN][NT][4];
            if (first || item == begin) {
                int start = item - at.chunk;
                whole = start >= begin && start + at.n_chunks <= end;
                owner = (int)((((int64_t)start + 1) * gridDim.x - 1) / n_items);
                n_left = 0;
                load_q();
            }
            chunk(acc, first || !whole);
            if (whole) {
                fold_into(acc);
                if (final) finish();
                continue;
            }
            leave(acc, slot(owner, at.chunk));
            n_left++;
            if (final || item == end - 1) arrive(owner, n_left);
        }
    }
};

template <kv_type_t TYPE, int HEAD_DIM, int NT>
__device__ __forceinline__ void attend(const struct attn_args &a)
{
    using S = shape<TYPE, HEAD_DIM, NT>;
    extern __shared__ __align__(1024) char smem[];
    map<S> m(smem);
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(m.full + i * 8, 1);
            mbarrier_init(m.empty + i * 8, WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    int64_t n_items = a.spans[a.n_blocks].first;
    int begin = (int)(n_items * blockIdx.x / gridDim.x), end = (int)(n_items * (blockIdx.x + 1) / gridDim.x);
    if (begin == end) return;
    if (threadIdx.x >= WARPS * 32) {
        produce<TYPE, HEAD_DIM, NT>(a, m, begin, end);
    } else {
        consumer<TYPE, HEAD_DIM, NT> c(a, m);
        c.run(begin, end, n_items);
    }
}

/* One warp: items before each block. */
extern "C" __global__ void __launch_bounds__(32) attn_plan(const __grid_constant__ struct attn_plan_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int lane = threadIdx.x, before = 0;
    for (int i0 = 0; i0 <= a.n_blocks; i0 += 32) {
        struct attn_span s = {};
        int i = i0 + lane, items = 0;
        if (i < a.n_blocks) {
            struct attn_block b = a.blocks[i];
            int n_keys = b.n > 0 ? a.pos[b.token + b.n - 1] + 1 : 0;
            s = {0, b.token, b.n, b.seq, n_keys};
            items = chunk_count(n_keys, a.first_chunk) * a.n_kv_heads;
        }
        int sum = items;
        for (int w = 1; w < 32; w *= 2) {
            int x = __shfl_up_sync(FULL_WARP, sum, w);
            if (lane >= w) sum += x;
        }
        s.first = before + sum - items;
        if (i <= a.n_blocks) a.spans[i] = s;
        before += __shfl_sync(FULL_WARP, sum, 31);
    }
}

#define ATTN(name, type, head_dim, nt)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
        attn_##name##_##head_dim##_##nt(const __grid_constant__ struct attn_args a)                \
    {                                                                                              \
        attend<type, head_dim, nt>(a);                                                             \
    }
#define ATTN_TYPE(name, type)                                                                      \
    ATTN(name, type, 64, 1) ATTN(name, type, 64, 2) ATTN(name, type, 64, 8)                        \
    ATTN(name, type, 128, 1) ATTN(name, type, 128, 2) ATTN(name, type, 128, 8)                     \
    ATTN(name, type, 256, 1) ATTN(name, type, 256, 2) ATTN(name, type, 256, 8)
ATTN_TYPE(bf16, KV_BF16)
ATTN_TYPE(e4m3, KV_E4M3)
