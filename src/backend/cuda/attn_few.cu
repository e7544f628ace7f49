/*
 * attn_few.cu - paged decode attention where there are few items (chunks of KV heads of tokens):
 * four blocks an item, so that a short context is read by many multiprocessors.  head_dim 128.
 *
 * The bits are those of attn_columns.cuh: a score is its key's and a column's alone, an output
 * element its element's of head_dim; so a chunk's keys are shared out for the scores and head_dim
 * for the output.  attn_rope_* does rope.cu's work too: every block norms and rotates its queries,
 * and those of the last chunk put the token's own k and v (one block of k, each its elements of v)
 * into its copy of their tiles and into the pages.
 *
 *   grid     a cluster of four blocks an item; block r has keys [64 r, 64 r + 64) of the chunk and
 *            elements [32 r, 32 r + 32) of head_dim
 *   memory   K: four tiles as in the pages; V: [256 keys][32 elements], swizzled by rows; scores of
 *            all keys as accumulators; P as B fragments
 *   a chunk  all copies at once; scores: warp w < 4 has a tile, and writes them and their maxima to
 *            all four blocks; P of tiles 2 w and 2 w + 1; output: a warp 16 of head_dim, one more
 *            sums P by lanes.  One barrier of the cluster and one of the block.
 *   fold     (m, l, O) of a chunk go to `partial`; of each quarter of head_dim the last block to
 *            arrive folds the chunks left to right.  `arrived`: a byte a quarter.
 *   bound    latency: launch, a load to find the keys, one of the keys, 24 products in a chain, the
 *            round of the fold through the L2 cache; some 4 us
 */
#include "backend/cuda/attn.cuh"
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/fragment.cuh"
#include "backend/cuda/rope.cuh"

enum {
    HEAD_DIM = 128,
    BLOCKS = ATTN_FEW_CLUSTER,
    WARPS = 8,
    THREADS = WARPS * 32,
    CHUNK_TILES = ATTN_CHUNK / KV_ROWS,
    OWN_TILES = CHUNK_TILES / BLOCKS,
    OWN_DIM = HEAD_DIM / BLOCKS,
    STEPS = HEAD_DIM / 16,
    DIM_BLOCKS = OWN_DIM / 16, /* warps of the output */
    FOLD_AHEAD = 4,            /* chunks whose results are loaded at once */
    HALF_WARPS = THREADS / 16,
    LANE_ELEMS = HEAD_DIM / 16,
    Q_ROW = HEAD_DIM + 8, /* fragments of 8 columns lie in different banks */
};

template <kv_type_t TYPE, int NT>
struct shape {
    static constexpr int COLS = NT * 8;
    static constexpr int SIZE = TYPE == KV_BF16 ? 2 : 1;
    static constexpr uint32_t TILE = KV_ROWS * HEAD_DIM * SIZE;
    static constexpr int PIECES =
        OWN_DIM * SIZE / 16; /* of 16 bytes, of V's own elements of a key */
    static constexpr uint32_t V_ROW = PIECES * 16, V_TILE = KV_ROWS * V_ROW;
    static constexpr int ROUNDS = (COLS + 2 + HALF_WARPS - 1) / HALF_WARPS; /* of make_heads */
    static constexpr int SLOT = COLS * (OWN_DIM + 2); /* floats of `partial` */
    static_assert(SLOT * BLOCKS * 4 == ATTN_FEW_BYTES(NT), "kernels.h");
    static_assert(DIM_BLOCKS + NT <= WARPS, "a warp an n8 block sums P");
};

template <kv_type_t TYPE, int NT>
struct memory {
    using S = shape<TYPE, NT>;
    __align__(128) char k[OWN_TILES * S::TILE];
    __align__(128) char v[CHUNK_TILES * S::V_TILE];
    float4 scores[CHUNK_TILES][NT][32];
    float maxima[CHUNK_TILES][S::COLS];
    uint2 p[CHUNK_TILES][NT][32];
    float sum[S::COLS];
    __align__(16) uint16_t q[S::COLS][Q_ROW];
    bool last;
};

/* Byte of piece `piece` of V's own elements of key `row` of a tile: rows share lines of 128 bytes,
 * and 8 rows' pieces lie in different banks. */
template <kv_type_t TYPE, int NT>
__device__ __forceinline__ uint32_t v_piece(uint32_t row, uint32_t piece)
{
    constexpr int P = shape<TYPE, NT>::PIECES;
    return row * (P * 16) + ((piece ^ (row / (8 / P) % P)) << 4);
}

struct item {
    struct attn_span span;
    struct chunk keys;
    int block, head, chunk, n_chunks; /* chunks count from the end of the shared prefix */
};

/* Item `i` of n_blocks * n_kv_heads * max_chunks; false: the block has no such chunk. */
__device__ __forceinline__ bool find(const struct attn_args &a, int i, struct item *it)
{
    it->chunk = i % a.max_chunks;
    it->head = i / a.max_chunks % a.n_kv_heads;
    it->block = i / a.max_chunks / a.n_kv_heads;
    it->span = a.spans[it->block];
    it->n_chunks = chunk_count(it->span.n_keys, a.first_chunk) - it->span.prefix;
    it->keys = chunk_at(it->chunk + it->span.prefix, it->span.n_keys, a.first_chunk);
    return it->chunk < it->n_chunks;
}

template <kv_type_t TYPE, int NT>
struct worker {
    using S = shape<TYPE, NT>;
    const struct attn_args &a;
    struct memory<TYPE, NT> &m;
    struct item it;
    int rank, warp, lane, g, c2, n_tiles;

    __device__ __forceinline__ worker(const struct attn_args &args,
                                      struct memory<TYPE, NT> &memory_)
        : a(args), m(memory_), rank(cluster_ctarank()), warp(threadIdx.x / 32),
          lane(threadIdx.x & 31), g(lane >> 2), c2((lane & 3) * 2)
    {
    }

    __device__ __forceinline__ size_t row_of(int col) /* of q and out, in heads */
    {
        return (size_t)it.span.token * (a.n_kv_heads * a.group) + it.head * a.group + col;
    }

    __device__ __forceinline__ const char *tile_at(const void *pages, int tile)
    {
        int64_t at = it.keys.key0 / KV_ROWS + tile;
        int64_t page = a.pages ? a.pages[(int64_t)it.block * a.max_chunks * CHUNK_TILES + at]
                               : a.tables[it.span.seq * a.table_ld + at];
        return (const char *)pages + (page * a.n_kv_heads + it.head) * S::TILE;
    }

    /* Two groups of copies: K, then V. */
    __device__ __forceinline__ void fetch(void)
    {
        constexpr int K_PIECES = OWN_TILES * S::TILE / 16, V_PIECES = CHUNK_TILES * S::V_TILE / 16;
        constexpr int IN_TILE = S::TILE / 16, IN_V_TILE = S::V_TILE / 16;
        static_assert(K_PIECES % THREADS == 0 && V_PIECES % THREADS == 0, "whole turns");
#pragma unroll
        for (int i = threadIdx.x; i < K_PIECES; i += THREADS) {
            int tile = rank * OWN_TILES + i / IN_TILE;
            if (tile < n_tiles)
                cp_async_cg_16(smem_addr(m.k + i * 16), tile_at(a.k, tile) + i % IN_TILE * 16, 16);
        }
        cp_async_commit_group();
#pragma unroll
        for (int i = threadIdx.x; i < V_PIECES; i += THREADS) {
            int tile = i / IN_V_TILE, row = i % IN_V_TILE / S::PIECES, piece = i % S::PIECES;
            if (tile < n_tiles)
                cp_async_cg_16(smem_addr(m.v + tile * S::V_TILE + v_piece<TYPE, NT>(row, piece)),
                               tile_at(a.v, tile) + kv_piece<TYPE>(row, rank * S::PIECES + piece),
                               16);
        }
        cp_async_commit_group();
    }

    /* B fragments of q, 0 past the last column; the scoring warps. */
    __device__ __forceinline__ void load_q(uint32_t q[STEPS][NT][2])
    {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint16_t *from = a.q + row_of(min(n * 8 + g, a.group - 1)) * HEAD_DIM;
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    uint32_t x = *(const uint32_t *)(from + q_elem<TYPE>(step, r));
                    q[step][n][r] = n * 8 + g < a.group ? x : 0;
                }
        }
    }

    /* The same of what make_heads has left. */
    __device__ __forceinline__ void take_q(uint32_t q[STEPS][NT][2])
    {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    uint32_t x = *(const uint32_t *)&m.q[n * 8 + g][q_elem<TYPE>(step, r)];
                    q[step][n][r] = n * 8 + g < a.group ? x : 0;
                }
    }

    /* k (unit == group) or v (group + 1) of the token, in its block's tiles and in the page. */
    __device__ __forceinline__ void put_own(const struct rope_args &r, const float x[LANE_ELEMS],
                                            bool is_v)
    {
        int row = (it.keys.n - 1) % KV_ROWS, tile = (it.keys.n - 1) / KV_ROWS;
        if (!is_v) {
            if (tile / OWN_TILES != rank) return;
            write_kv<TYPE, LANE_ELEMS>(m.k + tile % OWN_TILES * S::TILE, row, x, r.k_scale);
            write_kv<TYPE, LANE_ELEMS>((char *)tile_at(r.k, tile), row, x, r.k_scale);
            return;
        }
        char *page = (char *)tile_at(r.v, tile);
#pragma unroll
        for (int i = 0; i < LANE_ELEMS; i++) {
            int d = (lane & 15) + 16 * i, byte = d % OWN_DIM * S::SIZE;
            if (d / OWN_DIM != rank) continue;
            write_elem<TYPE>(m.v + tile * S::V_TILE + v_piece<TYPE, NT>(row, byte / 16) + byte % 16,
                             x[i], r.v_scale);
            write_elem<TYPE>(page + kv_elem<TYPE>(row, d), x[i], r.v_scale);
        }
    }

    /* rope.cu for this KV head's queries, and in the last chunk for its k and v; w: norm weights of
     * this half warp's heads.  The copies have landed when it returns. */
    __device__ __forceinline__ void make_heads(const struct rope_args &r,
                                               const float w[S::ROUNDS][LANE_ELEMS])
    {
        constexpr int ROUNDS = S::ROUNDS;
        bool own = it.chunk == it.n_chunks - 1;
        int units = a.group + (own ? 2 : 0), j = lane & 15;
        size_t token = it.span.token, angle = (size_t)(it.span.n_keys - 1) * (HEAD_DIM / 2);
        float x[ROUNDS][LANE_ELEMS], cs[LANE_ELEMS / 2], sn[LANE_ELEMS / 2];
#pragma unroll
        for (int i = 0; i < LANE_ELEMS / 2; i++) {
            cs[i] = r.cos[angle + j + 16 * i];
            sn[i] = r.sin[angle + j + 16 * i];
        }
#pragma unroll
        for (int t = 0; t < ROUNDS; t++) {
            int unit = t * HALF_WARPS + threadIdx.x / 16;
            int head = unit < a.group ? it.head * a.group + unit
                                      : r.n_heads + (unit - a.group) * r.n_kv_heads + it.head;
#pragma unroll
            for (int i = 0; i < LANE_ELEMS; i++)
                x[t][i] = unit < units ? r.qkv[token * r.ld + (size_t)head * HEAD_DIM + j + 16 * i]
                                       : 0.0f;
        }
#pragma unroll
        for (int t = 0; t < ROUNDS; t++) {
            int unit = t * HALF_WARPS + threadIdx.x / 16;
            float inv = inverse_rms<LANE_ELEMS>(x[t], r.eps);
            if (unit <= a.group) norm_rotate<LANE_ELEMS>(x[t], inv, w[t], cs, sn);
            if (unit < a.group)
#pragma unroll
                for (int i = 0; i < LANE_ELEMS; i++)
                    m.q[unit][j + 16 * i] = f32_bf16(x[t][i]);
        }
        cp_async_wait_group<0>();
        __syncthreads();
        if (!own) return;
#pragma unroll
        for (int t = 0; t < ROUNDS; t++) {
            int unit = t * HALF_WARPS + threadIdx.x / 16;
            if (unit >= a.group && unit < units) put_own(r, x[t], unit > a.group);
        }
        __syncthreads();
    }

    /* Scaled scores of this block's tile `warp`, -inf where there is no key, and the columns'
     * maxima, to all blocks of the cluster. */
    __device__ __forceinline__ void scores(const uint32_t q[STEPS][NT][2])
    {
        int tile = rank * OWN_TILES + warp;
        float s[NT][4] = {};
        if (tile < n_tiles) {
            uint32_t at = smem_addr(m.k) + warp * S::TILE;
            uint32_t k[STEPS][4];
#pragma unroll
            for (int pair = 0; pair < STEPS / 2; pair++)
                k_fragments<TYPE>(k + pair * 2, at, pair);
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_m16n8k16_bf16(s[n], k[step], q[step][n]);
        }
        int in_chunk = it.keys.n - tile * KV_ROWS; /* keys of the tile, or more, or less than 1 */
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = g + i / 2 * 8 < in_chunk ? __fmul_rn(s[n][i], a.scale) : ATTN_NONE;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[i] = max_nan(s[n][i], s[n][i + 2]);
#pragma unroll
                for (int w = 4; w < 32; w *= 2)
                    x[i] = max_nan(x[i], __shfl_xor_sync(FULL_WARP, x[i], w));
            }
            uint32_t to = smem_addr(&m.scores[tile][n][lane]),
                     to_max = smem_addr(&m.maxima[tile][n * 8 + c2]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                if (tile < n_tiles) st_shared_cluster_v4(mapa_shared_cluster(to, b), s[n]);
                if (lane < 4) st_shared_cluster_v2(mapa_shared_cluster(to_max, b), x[0], x[1]);
            }
        }
    }

    /* The chunk's maximum of columns n * 8 + c2 + i. */
    __device__ __forceinline__ void chunk_max(float out[2], int n)
    {
        out[0] = out[1] = ATTN_NONE;
#pragma unroll
        for (int t = 0; t < CHUNK_TILES; t++) {
            float2 x = *(const float2 *)&m.maxima[t][n * 8 + c2];
            out[0] = max_nan(out[0], x.x);
            out[1] = max_nan(out[1], x.y);
        }
    }

    /* P of tiles 2 * warp and 2 * warp + 1 as B fragments. */
    __device__ __forceinline__ void weights(void)
    {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float top[2];
            chunk_max(top, n);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                if (warp * 2 + t >= n_tiles) continue;
                float4 s = m.scores[warp * 2 + t][n][lane];
                float x[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[i] = exp_weight(__fsub_rn(x[i], top[i % 2] == ATTN_NONE ? 0.0f : top[i % 2]));
                m.p[warp * 2 + t][n][lane] = make_uint2(movmatrix_trans(bf16_pack(x[0], x[1])),
                                                        movmatrix_trans(bf16_pack(x[2], x[3])));
            }
        }
    }

    /* acc = P V of this block's elements [16 * warp, 16 * warp + 16). */
    __device__ __forceinline__ void output(float acc[NT][4])
    {
        for (int t0 = 0; t0 < n_tiles; t0 += 4) {
            uint32_t v[4][4], at = smem_addr(m.v) + t0 * S::V_TILE;
#pragma unroll
            for (int pair = 0; pair < 2; pair++)
                v_fragments_at<TYPE>(v + pair * 2, at + pair * 2 * S::V_TILE, S::V_TILE, warp,
                                     v_piece<TYPE, NT>);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                if (t0 + t >= n_tiles) break;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint2 b = m.p[t0 + t][n][lane];
                    uint32_t p[2] = {b.x, b.y};
                    mma_m16n8k16_bf16(acc[n], v[t], p);
                }
            }
        }
    }

    /* m.sum of column block n: the lanes' tree of attn_columns.cuh. */
    __device__ __forceinline__ void sum_p(int n)
    {
        float l[4] = {}; /* lanes 2c, 2c + 1, 2c + 8, 2c + 9 of column g */
        for (int t = 0; t < n_tiles; t++) {
            uint2 p = m.p[t][n][lane];
            l[0] = __fadd_rn(l[0], bf16_lo(p.x));
            l[1] = __fadd_rn(l[1], bf16_hi(p.x));
            l[2] = __fadd_rn(l[2], bf16_lo(p.y));
            l[3] = __fadd_rn(l[3], bf16_hi(p.y));
        }
        float even = __fadd_rn(l[0], l[2]), odd = __fadd_rn(l[1], l[3]);
#pragma unroll
        for (int w = 2; w; w /= 2) {
            even = __fadd_rn(even, __shfl_xor_sync(FULL_WARP, even, w));
            odd = __fadd_rn(odd, __shfl_xor_sync(FULL_WARP, odd, w));
        }
        float top = ATTN_NONE;
#pragma unroll
        for (int t = 0; t < CHUNK_TILES; t++)
            top = max_nan(top, m.maxima[t][n * 8 + g]);
        if (lane % 4 == 0) m.sum[n * 8 + g] = sum_of_chunk(__fadd_rn(even, odd), top);
    }

    __device__ __forceinline__ uint16_t result(float sum_of_p_v, float sum_of_p)
    {
        float x = __fdiv_rn(sum_of_p_v, sum_of_p);
        return f32_bf16(TYPE == KV_BF16 ? x : __fmul_rn(x, a.v_scale));
    }

    /* O [COLS][OWN_DIM], m [COLS], l [COLS] of this block's elements in chunk c. */
    __device__ __forceinline__ float *slot(int c)
    {
        int64_t pair = (int64_t)it.block * a.n_kv_heads + it.head;
        return a.partial + ((pair * a.max_chunks + c) * BLOCKS + rank) * S::SLOT;
    }

    /* Chunks left to right; a thread an element of a column. */
    __device__ __forceinline__ void fold(void)
    {
        int64_t step = BLOCKS * S::SLOT;
        for (int i = threadIdx.x; i < a.group * OWN_DIM; i += THREADS) {
            int col = i / OWN_DIM;
            size_t elem = row_of(col) * HEAD_DIM + rank * OWN_DIM + i % OWN_DIM;
            float high = 0.0f, l = 0.0f, x = 0.0f;
            bool go_on = it.span.prefix > 0;
            if (go_on) {
                high = a.state_ml[row_of(col) * 2];
                l = a.state_ml[row_of(col) * 2 + 1];
                x = a.state[elem];
            }
            const float *from = slot(0);
            for (int c0 = 0; c0 < it.n_chunks; c0 += FOLD_AHEAD) {
                float o[FOLD_AHEAD], mc[FOLD_AHEAD], lc[FOLD_AHEAD];
#pragma unroll
                for (int u = 0; u < FOLD_AHEAD; u++) { /* past the end the last one again */
                    const float *at = from + min(c0 + u, it.n_chunks - 1) * step;
                    o[u] = __ldcg(at + i);
                    mc[u] = __ldcg(at + S::COLS * OWN_DIM + col);
                    lc[u] = __ldcg(at + S::COLS * (OWN_DIM + 1) + col);
                }
#pragma unroll
                for (int u = 0; u < FOLD_AHEAD; u++) {
                    if (c0 + u >= it.n_chunks) break;
                    bool first = c0 + u == 0 && !go_on;
                    struct fold j = fold_begin(&high, mc[u], first);
                    l = fold_apply(l, lc[u], j, mc[u], first);
                    x = fold_apply(x, o[u], j, mc[u], first);
                }
            }
            a.out[elem] = result(x, l);
        }
    }

    /* This block's chunk is written; the last one of its quarter folds. */
    __device__ __forceinline__ void arrive(void)
    {
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t *arrived = a.arrived + (size_t)it.block * a.n_kv_heads + it.head;
            int shift = rank * 8;
            uint32_t old = count_in(arrived, 1u << shift) >> shift & 255;
            m.last = (int)old + 1 == it.n_chunks;
            if (m.last) atomicSub(arrived, (uint32_t)it.n_chunks << shift);
        }
        __syncthreads();
        if (m.last) fold();
    }

    __device__ __forceinline__ void leave(const float acc[NT][4], bool alone)
    {
        float *to = alone ? nullptr : slot(it.chunk);
        if (warp < DIM_BLOCKS) {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int col = n * 8 + c2 + i % 2, d = elem_of_row<TYPE>(warp, i / 2);
                    if (col >= a.group) continue;
                    if (alone)
                        a.out[row_of(col) * HEAD_DIM + rank * OWN_DIM + d] =
                            result(acc[n][i], m.sum[col]);
                    else
                        to[col * OWN_DIM + d] = acc[n][i];
                }
        } else if (!alone && warp == DIM_BLOCKS && lane < S::COLS) {
            float top = ATTN_NONE;
#pragma unroll
            for (int t = 0; t < CHUNK_TILES; t++)
                top = max_nan(top, m.maxima[t][lane]);
            to[S::COLS * OWN_DIM + lane] = top;
        } else if (!alone && warp == DIM_BLOCKS + 1 && lane < S::COLS) {
            to[S::COLS * (OWN_DIM + 1) + lane] = m.sum[lane];
        }
    }

    /* `rope` is NULL, or its work comes first. */
    __device__ __forceinline__ void run(const struct rope_args *rope,
                                        const float w[S::ROUNDS][LANE_ELEMS])
    {
        if (!find(a, blockIdx.x / BLOCKS, &it)) return;
        n_tiles = (it.keys.n + KV_ROWS - 1) / KV_ROWS;
        fetch();
        uint32_t q[STEPS][NT][2];
        if (rope) {
            make_heads(*rope, w);
            if (warp < OWN_TILES) take_q(q);
        } else {
            if (warp < OWN_TILES) load_q(q);
            cp_async_wait_group<1>();
            __syncthreads();
        }
        barrier_cluster_wait(); /* all blocks run */
        if (warp < OWN_TILES) scores(q);
        barrier_cluster_arrive();
        cp_async_wait_group<0>();
        barrier_cluster_wait();
        weights();
        __syncthreads();
        float acc[NT][4] = {};
        if (warp < DIM_BLOCKS)
            output(acc);
        else if (warp < DIM_BLOCKS + NT)
            sum_p(warp - DIM_BLOCKS);
        __syncthreads();
        bool alone = it.n_chunks == 1 && it.span.prefix == 0;
        leave(acc, alone);
        if (!alone) arrive();
    }
};

template <kv_type_t TYPE, int NT>
__device__ __forceinline__ void attend(const struct attn_args &a, const struct rope_args *rope)
{
    extern __shared__ __align__(128) char smem[];
    static_assert(sizeof(struct memory<TYPE, NT>) <= ATTN_FEW_SMEM(NT), "kernels.h");
    griddepcontrol_launch_dependents();
    barrier_cluster_arrive();
    constexpr int ROUNDS = shape<TYPE, NT>::ROUNDS;
    float w[ROUNDS][LANE_ELEMS] = {};
    if (rope)
#pragma unroll
        for (int t = 0; t < ROUNDS; t++) {
            int unit = t * HALF_WARPS + threadIdx.x / 16;
            const uint16_t *from = unit < a.group ? rope->q_norm : rope->k_norm;
#pragma unroll
            for (int i = 0; i < LANE_ELEMS; i++)
                w[t][i] = bf16_f32(from[(threadIdx.x & 15) + 16 * i]);
        }
    griddepcontrol_wait();
    worker<TYPE, NT> worker_(a, *(struct memory<TYPE, NT> *)smem);
    worker_.run(rope, w);
}

#define ATTN(type_name, type, nt)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 5 - nt)                         \
        attn_few_##type_name##_128_##nt(const __grid_constant__ struct attn_args a)       \
    {                                                                                     \
        attend<type, nt>(a, nullptr);                                                     \
    }                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 5 - nt)                         \
        attn_rope_##type_name##_128_##nt(const __grid_constant__ struct attn_rope_args a) \
    {                                                                                     \
        attend<type, nt>(a.attn, &a.rope);                                                \
    }
ATTN(bf16, KV_BF16, 1)
ATTN(bf16, KV_BF16, 2)
ATTN(e4m3, KV_E4M3, 1)
ATTN(e4m3, KV_E4M3, 2)
