/*
 * attn_columns.cuh - paged attention for few query columns: decode, and prefill of few tokens or
 * where attn_prefill.cu has no kernel.
 *
 * A column is one query head of one token; a block's columns share a KV head, so its keys are the
 * 16 rows of mma.sync m16n8k16 and the columns its n8 side.  An item is one chunk of one KV head of
 * one block.
 *
 *   grid     persistent blocks, two a multiprocessor (one for 64 columns); each takes a run of
 *            items
 *   roles    warps 0-7: arithmetic; warp 8: copies K and V stages ahead, also across items
 *   memory   ring of stages (4 tiles = 64 keys of K or V, one bulk copy a tile, full and empty
 *            mbarriers); q and P as B fragments; 8 warp maxima, row sum and position of each column
 *   a chunk  scores: warp w has tiles 2w and 2w + 1; maxima through shared memory; P to shared
 *            memory; output: each warp owns 16 of head_dim (or 2 x 16) and walks all keys in order;
 *            one warp an n8 block sums P by lanes on the way; fold in registers.  Two barriers.
 *   pairs    (block, KV head) that lie in one run are finished in registers; those cut by the
 *            border of a run leave (m, l, O) a chunk in `partial`, and the last one to arrive folds
 *            them in order
 *   bound    bytes of K and V at 4,390 GB/s.  A chunk is some 1,700 instructions a warp: 1.2 us
 *            of a multiprocessor's issue slots, where a bf16 chunk's 128 KB are 4 us of its share
 *            of the bandwidth, an e4m3 chunk's 2 us.
 */
#ifndef BACKEND_CUDA_ATTN_COLUMNS_CUH
#define BACKEND_CUDA_ATTN_COLUMNS_CUH

#include "backend/cuda/attn_chunk.cuh"

/* The arithmetic of a run of items: warps 0-7. */
template <kv_type_t TYPE, int HEAD_DIM, int NT>
struct consumer : columns<TYPE, HEAD_DIM, NT> {
    using C = columns<TYPE, HEAD_DIM, NT>;
    using S = shape<TYPE, HEAD_DIM, NT>;
    using C::a;
    using C::at;
    using C::c2;
    using C::chunk_max;
    using C::chunk_sum;
    using C::column_step;
    using C::f;
    using C::fetch_ahead;
    using C::fold_into;
    using C::lane;
    using C::load_state;
    using C::m;
    using C::n_cols;
    using C::o;
    using C::own;
    using C::own_max;
    using C::own_top;
    using C::result;
    using C::row_of;
    using C::scores;
    using C::start_pair;
    using C::sum;
    using C::sum_columns;
    using C::sum_tile;
    using C::sync;
    using C::top;
    using C::warp;
    using C::warp_maxima;
    using C::write_p;
    ring<S::STAGES> r;

    __device__ __forceinline__ consumer(const struct attn_args &args, const map<S> &map_)
        : C(args, map_), r{0, 0}
    {
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
        float l[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int t0 = 0; t0 < n_tiles; t0 += STAGE_TILES, r.next()) {
            mbarrier_wait(m.full + r.stage * 8, r.phase);
            uint32_t stage = m.stages + r.stage * S::STAGE;
            int n_here = n_tiles - t0;
            uint32_t v[S::OWN][STAGE_TILES][4];
#pragma unroll
            for (int d = 0; d < S::OWN; d++)
                if (warp + d * WARPS < S::STEPS) {
                    v_fragments<TYPE>(v[d], stage, S::TILE, warp + d * WARPS);
                    v_fragments<TYPE>(v[d] + 2, stage + 2 * S::TILE, S::TILE, warp + d * WARPS);
                }
#pragma unroll
            for (int t = 0; t < STAGE_TILES; t++) {
                if (t >= n_here) break;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint2 b = m.p[((t0 + t) * NT + n) * 32 + lane];
                    uint32_t p[2] = {b.x, b.y};
#pragma unroll
                    for (int d = 0; d < S::OWN; d++)
                        if (warp + d * WARPS < S::STEPS) mma_m16n8k16_bf16(acc[d][n], v[d][t], p);
                }
                if (warp < NT) sum_tile(l, m.p[((t0 + t) * NT + warp) * 32 + lane]);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(m.empty + r.stage * 8);
        }
        if (warp < NT) sum_columns(l);
    }

    /* Through the chunk: afterwards acc, chunk_max, chunk_sum and f are the chunk's. */
    __device__ __forceinline__ void chunk(float acc[S::OWN][NT][4], bool first, bool fetch,
                                          const struct cursor &next)
    {
        struct chunk c = at.keys(a);
        int n_tiles = (c.n + KV_ROWS - 1) / KV_ROWS,
            n_stages = (n_tiles + STAGE_TILES - 1) / STAGE_TILES;
        int tile = warp * 2, in_stage = tile % STAGE_TILES;
        float s[2][NT][4];
        if (warp / 2 < n_stages) { /* two warps a stage: each counts for four at its barrier */
            ring<S::STAGES> own = r.plus(warp / 2);
            mbarrier_wait(m.full + own.stage * 8, own.phase);
            scores(s, m.stages + own.stage * S::STAGE + in_stage * S::TILE, c.key0 + tile * KV_ROWS,
                   c.key0 + c.n);
            __syncwarp();
            if (lane < WARPS / 2) mbarrier_arrive(m.empty + own.stage * 8);
        } else {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[0][n][i] = s[1][n][i] = ATTN_NONE;
        }
        r = r.plus(n_stages);
        warp_maxima(s);
        sync();
        column_step(first);
        if (tile < n_tiles) write_p(s[0], tile);
        if (tile + 1 < n_tiles) write_p(s[1], tile + 1);
        if (fetch) fetch_ahead(next);
        sync();
        output(acc, n_tiles);
    }

    __device__ __forceinline__ void finish(void)
    {
        if (warp < NT && lane < 4) *(float2 *)&m.total[warp * 8 + c2] = make_float2(sum[0], sum[1]);
        sync();
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int col = n * 8 + c2 + i;
                if (col >= n_cols()) continue;
                uint16_t *out = a.out + row_of(at, col) * HEAD_DIM;
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (warp + d * WARPS < S::STEPS)
                            out[elem_of_row<TYPE>(warp + d * WARPS, h)] =
                                result(o[d][n][h * 2 + i], m.total[col]);
            }
    }

    /* Workspace of chunk `c` of the pair that starts in run `owner`: O [COLS][HEAD_DIM], m, l
     * [COLS]. */
    __device__ __forceinline__ float *slot(int owner, int c)
    {
        return a.partial + ((size_t)owner * a.max_chunks + c) * (S::COLS * (HEAD_DIM + 2));
    }

    __device__ __forceinline__ void leave(const float acc[S::OWN][NT][4], float *to)
    {
        if (warp < NT && lane < 4) {
            *(float2 *)&to[S::COLS * HEAD_DIM + warp * 8 + c2] =
                make_float2(own_max[0], own_max[1]);
            *(float2 *)&to[S::COLS * (HEAD_DIM + 1) + warp * 8 + c2] =
                make_float2(chunk_sum[0], chunk_sum[1]);
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int col = n * 8 + c2 + i;
                if (col >= n_cols()) continue;
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (warp + d * WARPS < S::STEPS)
                            to[col * HEAD_DIM + elem_of_row<TYPE>(warp + d * WARPS, h)] =
                                acc[d][n][h * 2 + i];
            }
    }

    /* All chunks of a cut pair, left to right; one thread four elements. */
    __device__ __forceinline__ void fold_slots(int owner)
    {
        constexpr int QUADS = HEAD_DIM / 4;
        for (int i = threadIdx.x; i < n_cols() * QUADS; i += WARPS * 32) {
            int col = i / QUADS;
            float high = 0.0f, l = 0.0f;
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            bool go_on = at.span.prefix > 0;
            if (go_on) {
                high = a.state_ml[row_of(at, col) * 2];
                l = a.state_ml[row_of(at, col) * 2 + 1];
                x = *(const float4 *)(a.state + row_of(at, col) * HEAD_DIM + i % QUADS * 4);
            }
            for (int c0 = 0; c0 < at.n_chunks; c0 += FOLD_AHEAD) {
                float mc[FOLD_AHEAD], lc[FOLD_AHEAD];
                float4 oc[FOLD_AHEAD];
#pragma unroll
                for (int u = 0; u < FOLD_AHEAD; u++) { /* past the end the last one again */
                    const float *from = slot(owner, min(c0 + u, at.n_chunks - 1));
                    mc[u] = __ldcg(from + S::COLS * HEAD_DIM + col);
                    lc[u] = __ldcg(from + S::COLS * (HEAD_DIM + 1) + col);
                    oc[u] = __ldcg((const float4 *)from + i);
                }
#pragma unroll
                for (int u = 0; u < FOLD_AHEAD; u++) {
                    if (c0 + u >= at.n_chunks) break;
                    bool first = c0 + u == 0 && !go_on;
                    struct fold j = fold_begin(&high, mc[u], first);
                    l = fold_apply(l, lc[u], j, mc[u], first);
                    x.x = fold_apply(x.x, oc[u].x, j, mc[u], first);
                    x.y = fold_apply(x.y, oc[u].y, j, mc[u], first);
                    x.z = fold_apply(x.z, oc[u].z, j, mc[u], first);
                    x.w = fold_apply(x.w, oc[u].w, j, mc[u], first);
                }
            }
            ushort4 out =
                make_ushort4(result(x.x, l), result(x.y, l), result(x.z, l), result(x.w, l));
            *(ushort4 *)(a.out + row_of(at, col) * HEAD_DIM + i % QUADS * 4) = out;
        }
    }

    /* `n` chunks of a cut pair are written; the one that completes it folds. */
    __device__ __forceinline__ void arrive(int owner, int n)
    {
        sync();
        if (threadIdx.x == 0) {
            uint32_t *arrived = a.arrived + (size_t)at.block * a.n_kv_heads + at.head;
            bool done = count_in(arrived, (uint32_t)n) + n == at.n_chunks;
            if (done) *arrived = 0;
            m.total[0] = done ? 1.0f : 0.0f;
        }
        sync();
        if (m.total[0] != 0.0f) fold_slots(owner);
    }

    __device__ __forceinline__ void run(int begin, int end, int length)
    {
        at.find(a, begin);
        fetch_ahead(at);
        int n_left = 0, owner = 0;
        bool whole = false;
        for (int item = begin; item < end; item++) {
            bool begins = at.chunk == 0, final = at.chunk == at.n_chunks - 1, more = item + 1 < end;
            bool first = begins && at.span.prefix == 0;
            float acc[S::OWN][NT][4];
            struct cursor next = at;
            if (more) next.next(a);
            if (begins || item == begin) {
                int start = item - at.chunk;
                whole = start >= begin && start + at.n_chunks <= end;
                owner = start / length;
                n_left = 0;
                if (whole && !first) load_state();
                start_pair();
            }
            chunk(acc, first || !whole, final && more, next);
            if (whole) {
                fold_into(acc, first);
                if (final) finish();
            } else {
                leave(acc, slot(owner, at.chunk));
                n_left++;
                if (final || !more) arrive(owner, n_left);
            }
            at = next;
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
    /* Runs of equal length, so that pairs of equal length are seldom cut. */
    int n_items = a.spans[a.n_blocks].first, length = a.spans[a.n_blocks].token;
    int begin = min(n_items, (int)blockIdx.x * length), end = min(n_items, begin + length);
    if (begin == end) return;
    if (threadIdx.x >= WARPS * 32) {
        produce<TYPE, HEAD_DIM, NT>(a, m, begin, end);
    } else {
        consumer<TYPE, HEAD_DIM, NT> c(a, m);
        c.run(begin, end, length);
    }
}

/* Decode (groups up to 8 and up to 16) and short prefill of one KV type and head_dim. */
#define ATTN(name, type, head_dim, nt)                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, ATTN_PER_SM(head_dim, nt)) \
        attn_##name##_##head_dim##_##nt(const __grid_constant__ struct attn_args a)  \
    {                                                                                \
        attend<type, head_dim, nt>(a);                                               \
    }
#define ATTN_HEAD_DIM(name, type, head_dim) \
    ATTN(name, type, head_dim, 1) ATTN(name, type, head_dim, 2) ATTN(name, type, head_dim, 8)

#endif
