/*
 * attn_few.cu - a decode step of few tokens: norm and rotation of q and k, KV write and attention.
 *
 *   grid     (chunks, KV heads, tokens): a block a chunk, the chunks of a token and KV head are a
 *            cluster; 8 warps
 *   memory   the chunk's K and V, copied before the wait: keys of earlier steps; the token's own
 *            are put in their place from registers
 *   roles    half a warp a head of q, k or v (rope.cuh); then as in attn_columns.cuh: scores a warp
 *            two tiles, output a warp 16 of head_dim; each block sends the others their part of
 *            (m, l, O), and folds its own part of head_dim over the chunks
 *   bound    latency: a load, the head's norm, 8 + 16 k16 steps, two exchanges in the block and one
 *            in the cluster
 */
#include "backend/cuda/attn.cuh"
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/fragment.cuh"
#include "backend/cuda/rope.cuh"

enum {
    THREADS = ATTN_FEW_THREADS,
    WARPS = THREADS / 32,
    DIM = ATTN_FEW_DIM,
    E = DIM / 16, /* elements a thread; k16 steps of the scores */
    TILES = ATTN_CHUNK / KV_ROWS,
    COLS = 8,
    K_UNIT = 8, /* half warps: heads of q, then these */
    V_UNIT = 9
};
static_assert(WARPS * 2 == TILES && WARPS * 16 == DIM, "two tiles and a block of head_dim a warp");

/* Dynamic shared memory, in this order. */
template <kv_type_t TYPE>
struct map {
    static constexpr uint32_t TILE = KV_ROWS * DIM * (TYPE == KV_BF16 ? 2 : 1);
    uint32_t k, v;
    char *k_at, *v_at;
    uint2 *q, *p; /* B fragments */
    float *part;  /* [chunk][COLS][DIM] */
    __device__ __forceinline__ map(char *smem)
    {
        k_at = smem;
        v_at = k_at + TILES * TILE;
        k = smem_addr(k_at);
        v = smem_addr(v_at);
        q = (uint2 *)(v_at + TILES * TILE);
        p = q + E * 32;
        part = (float *)(p + TILES * 32);
    }
};

struct own {
    int token, head, group, rank, ranks, n_keys, n_chunks;
    struct chunk c;
    int n_tiles;
};

__device__ __forceinline__ struct own find(const struct attn_few_args &a)
{
    struct own o;
    o.token = blockIdx.z;
    o.head = blockIdx.y;
    o.group = a.rope.n_heads / a.rope.n_kv_heads;
    o.rank = blockIdx.x;
    o.ranks = gridDim.x;
    o.n_keys = a.rope.seq[o.token] < 0 ? 0 : a.rope.pos[o.token] + 1;
    o.n_chunks = chunk_count(o.n_keys, ATTN_CHUNK);
    o.c = chunk_at(o.rank, o.n_keys, ATTN_CHUNK);
    o.n_tiles = o.rank < o.n_chunks ? (o.c.n + KV_ROWS - 1) / KV_ROWS : 0;
    return o;
}

/* By one warp: K and V of the chunk's tiles; returns this lane's page. */
template <kv_type_t TYPE>
__device__ __forceinline__ void fetch(const struct attn_few_args &a, const map<TYPE> &m,
                                      const struct own &o, uint32_t full)
{
    constexpr uint32_t TILE = map<TYPE>::TILE;
    int lane = threadIdx.x & 31;
    if (lane == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(full + 8, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(full, o.n_tiles * TILE);
        mbarrier_arrive_expect_tx(full + 8, o.n_tiles * TILE);
    }
    __syncwarp();
    if (lane >= o.n_tiles) return;
    int64_t row = a.rope.seq[o.token] * a.rope.table_ld;
    size_t page = a.rope.tables[row + o.c.key0 / KV_ROWS + lane];
    size_t from = (page * a.rope.n_kv_heads + o.head) * TILE;
    cp_async_bulk(m.k + lane * TILE, (const char *)a.rope.k + from, TILE, full);
    cp_async_bulk(m.v + lane * TILE, (const char *)a.rope.v + from, TILE, full + 8);
}

/* A head of q to its column of B fragments. */
template <kv_type_t TYPE>
__device__ __forceinline__ void put_q(const map<TYPE> &m, int col, const float x[E])
{
    int e = threadIdx.x & 15; /* of each 16: q_elem of fragment.cuh, the other way round */
    int c = TYPE == KV_BF16 ? e % 8 / 2 : e / 4, r = TYPE == KV_BF16 ? e / 8 : e / 2 % 2;
    uint16_t *to = (uint16_t *)m.q + (col * 4 + c) * 4 + r * 2 + e % 2;
#pragma unroll
    for (int i = 0; i < E; i++)
        to[i * 32 * 4] = f32_bf16(x[i]);
}

/* Heads: q to the columns, and by the block of the last chunk k and v to their page, here and in
 * memory. */
template <kv_type_t TYPE>
struct heads {
    float x[E], w[E], cs[E / 2], sn[E / 2];
    int unit;
    bool is_q, is_kv;

    /* What does not depend on the kernel before. */
    __device__ __forceinline__ void begin(const struct attn_few_args &a, const struct own &o)
    {
        const struct rope_args &r = a.rope;
        int lane = threadIdx.x & 15;
        unit = threadIdx.x / 16;
        is_q = unit < o.group && o.n_tiles;
        is_kv = (unit == K_UNIT || unit == V_UNIT) && o.rank + 1 == o.n_chunks;
        const uint16_t *norm = unit < K_UNIT ? r.q_norm : r.k_norm;
        size_t angle = o.n_keys ? (size_t)(o.n_keys - 1) * (DIM / 2) : 0;
#pragma unroll
        for (int i = 0; i < E; i++)
            w[i] = bf16_f32(norm[lane + 16 * i]);
#pragma unroll
        for (int i = 0; i < E / 2; i++) {
            cs[i] = r.cos[angle + lane + 16 * i];
            sn[i] = r.sin[angle + lane + 16 * i];
        }
    }

    __device__ __forceinline__ void load(const struct attn_few_args &a, const struct own &o)
    {
        const struct rope_args &r = a.rope;
        int head = unit < K_UNIT ? o.head * o.group + unit
                                 : r.n_heads + (unit - K_UNIT) * r.n_kv_heads + o.head;
        const float *from = r.qkv + (size_t)o.token * r.ld + (size_t)head * DIM;
#pragma unroll
        for (int i = 0; i < E; i++)
            x[i] = is_q || is_kv ? from[(threadIdx.x & 15) + 16 * i] : 0.0f;
    }

    /* To shared memory. */
    __device__ __forceinline__ void finish(const struct attn_few_args &a, const map<TYPE> &m,
                                           const struct own &o, uint32_t full)
    {
        const struct rope_args &r = a.rope;
        float inv = head_rms<E>(x, r.eps);
        if (unit != V_UNIT) norm_rotate<E>(x, inv, w, cs, sn);
        if (unit < COLS && o.n_tiles) put_q<TYPE>(m, unit, x); /* zeros of 0 where there is none */
        if (!is_kv) return;
        bool is_v = unit == V_UNIT;
        int tile = (o.n_keys - 1 - o.c.key0) / KV_ROWS;
        mbarrier_wait(full + is_v * 8, 0); /* the page as it was is here: over it */
        write_kv<TYPE, E>((is_v ? m.v_at : m.k_at) + tile * map<TYPE>::TILE,
                          (o.n_keys - 1) % KV_ROWS, x, is_v ? r.v_scale : r.k_scale);
    }

    /* To the page, where later steps find it. */
    __device__ __forceinline__ void store(const struct attn_few_args &a, const struct own &o)
    {
        if (!is_kv) return;
        const struct rope_args &r = a.rope;
        bool is_v = unit == V_UNIT;
        int pos = o.n_keys - 1;
        size_t page = r.tables[r.seq[o.token] * r.table_ld + pos / KV_ROWS];
        write_kv<TYPE, E>((char *)(is_v ? r.v : r.k) +
                              (page * r.n_kv_heads + o.head) * map<TYPE>::TILE,
                          pos % KV_ROWS, x, is_v ? r.v_scale : r.k_scale);
    }
};

/* Scaled scores of the warp's two tiles, ATTN_NONE past the end. */
template <kv_type_t TYPE>
__device__ __forceinline__ void scores(float s[2][4], const struct attn_few_args &a,
                                       const map<TYPE> &m, const struct own &o)
{
    int lane = threadIdx.x & 31, t0 = threadIdx.x / 32 * 2, end = o.c.n;
    uint32_t tile = m.k + t0 * map<TYPE>::TILE;
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[t][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < E; step += 2) {
        uint32_t k[2][2][4];
        k_fragments<TYPE>(k[0], tile, step / 2);
        k_fragments<TYPE>(k[1], tile + map<TYPE>::TILE, step / 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint2 b = m.q[(step + i) * 32 + lane];
            uint32_t q[2] = {b.x, b.y};
            mma_m16n8k16_bf16(s[0], k[0][i], q);
            mma_m16n8k16_bf16(s[1], k[1][i], q);
        }
    }
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = (t0 + t) * KV_ROWS + lane / 4 + i / 2 * 8;
            s[t][i] = key < end ? __fmul_rn(s[t][i], a.scale) : ATTN_NONE;
        }
}

/* The chunk's maxima of columns c2, c2 + 1. */
__device__ __forceinline__ void maxima(float max[2], const float s[2][4], float2 room[WARPS][4])
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        max[i] = max_nan(max_nan(s[0][i], s[0][i + 2]), max_nan(s[1][i], s[1][i + 2]));
#pragma unroll
        for (int w = 4; w < 32; w *= 2)
            max[i] = max_nan(max[i], __shfl_xor_sync(FULL_WARP, max[i], w));
    }
    if (lane < 4) room[threadIdx.x / 32][lane] = make_float2(max[0], max[1]);
    __syncthreads();
    max[0] = max[1] = ATTN_NONE;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float2 x = room[w][lane & 3];
        max[0] = max_nan(max[0], x.x);
        max[1] = max_nan(max[1], x.y);
    }
}

/* P of a tile as B fragments. */
__device__ __forceinline__ void write_p(uint2 *p, const float s[4], const float max[2])
{
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = exp_weight(__fsub_rn(s[i], max[i % 2] == ATTN_NONE ? 0.0f : max[i % 2]));
    p[threadIdx.x & 31] =
        make_uint2(movmatrix_trans(bf16_pack(x[0], x[1])), movmatrix_trans(bf16_pack(x[2], x[3])));
}

/* P V over the chunk's keys in order, 16 of head_dim a warp. */
template <kv_type_t TYPE>
__device__ __forceinline__ void output(float acc[4], const map<TYPE> &m, const struct own &o)
{
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    for (int t0 = 0; t0 < o.n_tiles; t0 += 4) {
        uint32_t v[4][4];
#pragma unroll
        for (int t = 0; t < 4; t += 2)
            v_fragments<TYPE>(v + t, m.v + (t0 + t) * map<TYPE>::TILE, map<TYPE>::TILE,
                              threadIdx.x / 32);
#pragma unroll
        for (int t = 0; t < 4; t++) {
            if (t0 + t >= o.n_tiles) break;
            uint2 b = m.p[(t0 + t) * 32 + (threadIdx.x & 31)];
            uint32_t p[2] = {b.x, b.y};
            mma_m16n8k16_bf16(acc, v[t], p);
        }
    }
}

/* The row sums of P of columns c2, c2 + 1: lanes of keys, then their tree; by one warp. */
__device__ __forceinline__ void sums(float sum[2], const uint2 *p, int n_tiles, const float max[2])
{
    float l[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int lane = threadIdx.x & 31, c2 = lane % 4 * 2;
#pragma unroll 4
    for (int t = 0; t < n_tiles; t++) {
        uint2 x = p[t * 32 + lane];
        l[0] = __fadd_rn(l[0], bf16_lo(x.x));
        l[1] = __fadd_rn(l[1], bf16_hi(x.x));
        l[2] = __fadd_rn(l[2], bf16_lo(x.y));
        l[3] = __fadd_rn(l[3], bf16_hi(x.y));
    }
    float x = sum_lanes(l);
    sum[0] = sum_of_chunk(__shfl_sync(FULL_WARP, x, c2 * 4), max[0]);
    sum[1] = sum_of_chunk(__shfl_sync(FULL_WARP, x, c2 * 4 + 4), max[1]);
}

/* To the block that folds this warp's part of head_dim. */
template <kv_type_t TYPE>
__device__ __forceinline__ void send(const map<TYPE> &m, const struct own &o, const float acc[4])
{
    int warp = threadIdx.x / 32, c2 = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float *to = m.part + (o.rank * COLS + c2 + i % 2) * DIM + elem_of_row<TYPE>(warp, i / 2);
        st_shared_cluster_u32(mapa_shared_cluster(smem_addr(to), warp * o.ranks / WARPS),
                              __float_as_uint(acc[i]));
    }
}

/* This block's part of head_dim over all chunks, left to right; a thread four elements. */
template <kv_type_t TYPE>
__device__ __forceinline__ void fold(const struct attn_few_args &a, const map<TYPE> &m,
                                     const struct own &o, const float4 ml[][COLS / 2])
{
    int shift = __ffs(DIM / 4) - __ffs(o.ranks); /* a power of 2 */
    int col = threadIdx.x >> shift, d = (o.rank << shift | (threadIdx.x & ((1 << shift) - 1))) * 4;
    if (col >= o.group || o.n_chunks == 0) return;
    float high = 0.0f, l = 0.0f;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int c = 0; c < o.n_chunks; c++) {
        float4 both = ml[c][col / 2], oc = *(const float4 *)(m.part + (c * COLS + col) * DIM + d);
        float mc = col % 2 ? both.y : both.x, lc = col % 2 ? both.w : both.z;
        struct fold j = fold_begin(&high, mc, c == 0);
        l = fold_apply(l, lc, j, mc, c == 0);
        x.x = fold_apply(x.x, oc.x, j, mc, c == 0);
        x.y = fold_apply(x.y, oc.y, j, mc, c == 0);
        x.z = fold_apply(x.z, oc.z, j, mc, c == 0);
        x.w = fold_apply(x.w, oc.w, j, mc, c == 0);
    }
    float r[4] = {__fdiv_rn(x.x, l), __fdiv_rn(x.y, l), __fdiv_rn(x.z, l), __fdiv_rn(x.w, l)};
    if (TYPE == KV_E4M3)
#pragma unroll
        for (int i = 0; i < 4; i++)
            r[i] = __fmul_rn(r[i], a.rope.v_scale);
    size_t row = (size_t)o.token * a.rope.n_heads + o.head * o.group + col;
    *(uint2 *)(a.out + row * DIM + d) = make_uint2(bf16_pack(r[0], r[1]), bf16_pack(r[2], r[3]));
}

template <kv_type_t TYPE>
__device__ __forceinline__ void attend(const struct attn_few_args &a)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ uint64_t full[2];
    __shared__ float2 room[WARPS][4];
    __shared__ float4 ml[ATTN_FEW_CHUNKS][COLS / 2]; /* m, m, l, l of two columns */
    map<TYPE> m(smem);
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    barrier_cluster_arrive();
    griddepcontrol_launch_dependents();
    struct own o = find(a);
    if (warp == 0) fetch<TYPE>(a, m, o, smem_addr(full));
    struct heads<TYPE> h;
    h.begin(a, o);
    __syncthreads(); /* the barriers of the copies */
    griddepcontrol_wait();
    h.load(a, o);
    h.finish(a, m, o, smem_addr(full));
    __syncthreads();
    float s[2][4], max[2], sum[2], acc[4];
    if (o.n_tiles) {
        mbarrier_wait(smem_addr(full), 0);
        scores<TYPE>(s, a, m, o);
        maxima(max, s, room);
        write_p(m.p + warp * 2 * 32, s[0], max);
        write_p(m.p + (warp * 2 + 1) * 32, s[1], max);
        __syncthreads();
        mbarrier_wait(smem_addr(full + 1), 0);
        output<TYPE>(acc, m, o);
        if (warp == 0) sums(sum, m.p, o.n_tiles, max);
        h.store(a, o);
    }
    barrier_cluster_wait(); /* all blocks run */
    if (o.n_tiles) {
        send<TYPE>(m, o, acc);
        float v[4] = {max[0], max[1], sum[0], sum[1]};
        if (warp == 0 && lane / 4 < o.ranks)
            st_shared_cluster_v4(mapa_shared_cluster(smem_addr(&ml[o.rank][lane % 4]), lane / 4),
                                 v);
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    fold<TYPE>(a, m, o, ml);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attn_few_bf16(const __grid_constant__ struct attn_few_args a)
{
    attend<KV_BF16>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attn_few_e4m3(const __grid_constant__ struct attn_few_args a)
{
    attend<KV_E4M3>(a);
}
