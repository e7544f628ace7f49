/*
 * attn_prefill.cu - paged attention for many query columns: head_dim 128, on wgmma.
 *
 * Columns (a query head of a token; those of a block share a KV head) are the 64 rows of wgmma
 * here, keys its n side; the bits are those of attn_columns.cuh (feasibility: one bf16 tensor-core
 * function whatever the shape and operand).
 *
 *   grid     one persistent block a multiprocessor; pairs (block, KV head) are dealt from the last
 *            to the first, in alternating direction, so that long and short ones mix
 *   roles    warpgroup 0: one warp copies; E4M3: the other three turn copied stages into BF16 ones;
 *            1 and 2: 64 columns each, taking turns, so that one's softmax hides behind the other's
 *            products
 *   memory   q [2 warpgroups][2 halves][64 rows][128 bytes]; ring of stages of 128 keys of K or V:
 *            [2 halves][128 keys][128 bytes], all in the 128-byte swizzle (that of the pages);
 *            E4M3: a ring of stages of copied tiles before it
 *   a chunk  scores of 128 or 256 keys in registers (2 x 64); maximum; P over them as A fragments,
 *            summed by lanes; output from zero (64); fold (64)
 *   bound    4 * 128 operations a column and key at 670 TFLOP/s.  Softmax is some 20 f32 operations
 *            a score: 1.2 times the products' time, so about 55 % of the bound where the two
 *            overlap fully.
 *
 * A stage is always copied whole: places behind the last page repeat it, so that V holds finite
 * numbers where P is 0.
 */
#include "backend/cuda/attn.cuh"
#include "backend/cuda/fragment.cuh"
#include "backend/cuda/wgmma_attn.cuh"

enum {
    HEAD_DIM = 128,
    HALVES = 2,
    GROUP_ROWS = 64, /* columns of a warpgroup */
    STAGE_KEYS = 128,
    STAGE_TILES = STAGE_KEYS / KV_ROWS,
    HALF_TILE = KV_ROWS * 128,
    HALF_STAGE = STAGE_KEYS * 128,
    STAGE = HALVES * HALF_STAGE,
    Q_GROUP = HALVES * GROUP_ROWS * 128,
    RAW_TILE = KV_ROWS * HEAD_DIM, /* E4M3 */
    RAW_STAGE = STAGE_TILES * RAW_TILE,
    CONVERTERS = 3, /* warps */
    THREADS = 384,
};

template <kv_type_t TYPE>
struct shape {
    static constexpr int STAGES = TYPE == KV_BF16 ? 6 : 5, RAW_STAGES = TYPE == KV_BF16 ? 0 : 2;
    static constexpr int FEW_REGS = TYPE == KV_BF16 ? 24 : 40,
                         MANY_REGS = TYPE == KV_BF16 ? 240 : 232;
    static_assert(STAGES * STAGE + RAW_STAGES * RAW_STAGE + 2 * Q_GROUP +
                          (STAGES + RAW_STAGES) * 16 <=
                      ATTN_PREFILL_SMEM,
                  "kernels.h");
};

struct place {
    uint32_t q, stages, full, empty, raw, raw_full, raw_empty;
};

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

/* The n-th pair of this block; -1: none is left. */
__device__ __forceinline__ int pair_at(const struct attn_args &a, int n)
{
    int all = a.n_blocks * a.n_kv_heads, grid = gridDim.x, i = blockIdx.x;
    int at = n * grid + (n & 1 ? grid - 1 - i : i);
    return at < all ? all - 1 - at : n * grid < all ? -2 : -1;
}

/* One warp: tiles to `stage`, as they are (E4M3) or by halves (BF16). */
template <kv_type_t TYPE>
__device__ __forceinline__ void copy_stage(const struct attn_args &a, uint32_t stage, uint32_t full,
                                           int64_t page, int head, const void *base)
{
    int lane = threadIdx.x & 31;
    constexpr int PARTS = TYPE == KV_BF16 ? HALVES : 1,
                  BYTES = TYPE == KV_BF16 ? HALF_TILE : RAW_TILE;
    const char *from =
        (const char *)base + ((page * a.n_kv_heads + head) * PARTS + lane % PARTS) * BYTES;
    if (lane == 0) mbarrier_arrive_expect_tx(full, STAGE_TILES * PARTS * BYTES);
    __syncwarp();
    if (lane < STAGE_TILES * PARTS)
        cp_async_bulk(stage + lane % PARTS * HALF_STAGE + lane / PARTS * BYTES, from, BYTES, full);
}

template <kv_type_t TYPE>
__device__ __forceinline__ void produce(const struct attn_args &a, const struct place &m)
{
    constexpr bool BF16 = TYPE == KV_BF16;
    constexpr int PARTS = BF16 ? HALVES : 1;
    uint32_t stages = BF16 ? m.stages : m.raw, full = BF16 ? m.full : m.raw_full,
             empty = BF16 ? m.empty : m.raw_empty;
    int lane = threadIdx.x & 31;
    ring<BF16 ? shape<TYPE>::STAGES : shape<KV_E4M3>::RAW_STAGES> r = {0, 1};
    for (int n = 0, pair; (pair = pair_at(a, n)) != -1; n++) {
        if (pair < 0) continue;
        struct attn_span span = a.spans[pair / a.n_kv_heads];
        int head = pair % a.n_kv_heads, n_chunks = chunk_count(span.n_keys, a.first_chunk);
        for (int i = 0; i < n_chunks; i++) {
            struct chunk c = chunk_at(i, span.n_keys, a.first_chunk);
            int last = (c.n - 1) / KV_ROWS; /* tile */
            int64_t page =
                a.tables[span.seq * a.table_ld + c.key0 / KV_ROWS + min(lane & 15, last)];
            for (int is_v = 0; is_v < 2; is_v++)
                for (int t = 0; t <= last; t += STAGE_TILES, r.next()) {
                    int64_t own = __shfl_sync(FULL_WARP, page, (t + lane / PARTS) & 15);
                    mbarrier_wait(empty + r.stage * 8, r.phase);
                    copy_stage<TYPE>(a, stages + r.stage * (BF16 ? STAGE : RAW_STAGE),
                                     full + r.stage * 8, own, head, is_v ? a.v : a.k);
                }
        }
    }
}

/* 16 E4M3 codes at piece `i` of a stage of tiles to two pieces of a BF16 stage. */
__device__ __forceinline__ void convert_piece(uint32_t raw, uint32_t stage, int i)
{
    int row = i % 64 / 4, key = i / 128 * KV_ROWS + row, half = i / 64 % 2,
        piece = (i % 4 ^ (row >> 1 & 3)) * 2;
    uint32_t x[4], to = stage + half * HALF_STAGE + key * 128;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(raw + i * 16)
                 : "memory");
#pragma unroll
    for (int h = 0; h < 2; h++)
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + ((piece + h) ^ (key & 7)) * 16),
            "r"(e4m3x2_bf16x2(prmt(x[h * 2], SIGNED_BYTES(0, 1)))),
            "r"(e4m3x2_bf16x2(prmt(x[h * 2], SIGNED_BYTES(2, 3)))),
            "r"(e4m3x2_bf16x2(prmt(x[h * 2 + 1], SIGNED_BYTES(0, 1)))),
            "r"(e4m3x2_bf16x2(prmt(x[h * 2 + 1], SIGNED_BYTES(2, 3))))
            : "memory");
}

/* The warps behind the first: every copied stage in turn. */
__device__ __forceinline__ void convert(const struct attn_args &a, const struct place &m)
{
    int lane = threadIdx.x & 31;
    ring<shape<KV_E4M3>::STAGES> r = {0, 1};
    ring<shape<KV_E4M3>::RAW_STAGES> w = {0, 0};
    for (int n = 0, pair; (pair = pair_at(a, n)) != -1; n++) {
        if (pair < 0) continue;
        struct attn_span span = a.spans[pair / a.n_kv_heads];
        int n_chunks = chunk_count(span.n_keys, a.first_chunk);
        for (int i = 0; i < n_chunks; i++) {
            int n_stages = chunk_at(i, span.n_keys, a.first_chunk).n > STAGE_KEYS ? 4 : 2;
            for (int s = 0; s < n_stages; s++, r.next(), w.next()) {
                mbarrier_wait(m.raw_full + w.stage * 8, w.phase);
                mbarrier_wait(m.empty + r.stage * 8, r.phase);
#pragma unroll 2
                for (int j = threadIdx.x - 32; j < RAW_STAGE / 16; j += CONVERTERS * 32)
                    convert_piece(m.raw + w.stage * RAW_STAGE, m.stages + r.stage * STAGE, j);
                fence_proxy_async_shared();
                __syncwarp();
                if (lane == 0) {
                    mbarrier_arrive(m.full + r.stage * 8);
                    mbarrier_arrive(m.raw_empty + w.stage * 8);
                }
            }
        }
    }
}

/* PREFIX: every column sees all keys, and (m, l, O) is the result. One thread of a warpgroup:
 * rows row and row + 8 of its warp's 16; accumulator 4 j + 2 h + i is row h, n 8 j + c2 + i. */
template <kv_type_t TYPE, bool PREFIX>
struct consumer {
    const struct attn_args &a;
    const struct place m;
    ring<shape<TYPE>::STAGES> r;
    struct attn_span span, next;
    int head, next_head, group, row, c2;
    float o[64], top[2], sum[2];

    __device__ __forceinline__ consumer(const struct attn_args &args, const struct place &place_)
        : a(args), m(place_), r{0, 0}, group(threadIdx.x / 128 - 1),
          row(threadIdx.x % 128 / 32 * 16 + (threadIdx.x & 31) / 4), c2((threadIdx.x & 3) * 2)
    {
    }

    __device__ __forceinline__ size_t row_of(const struct attn_span &of, int of_head,
                                             int col) /* of q and out, in heads */
    {
        size_t token = of.token + col / a.group;
        return token * (a.n_kv_heads * a.group) + of_head * a.group + col % a.group;
    }

    __device__ __forceinline__ int pos_of(int col)
    {
        return !PREFIX && col < span.n * a.group ? span.n_keys - span.n + col / a.group
                                                 : span.n_keys - 1;
    }

    /* Queue the copy of q of this warpgroup's columns; its products with the last q are done. */
    __device__ __forceinline__ void fetch_q(const struct attn_span &of, int of_head)
    {
        int piece = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < GROUP_ROWS * 16 / 128; i++) {
            int at = threadIdx.x % 128 / 16 + i * 8, col = group * GROUP_ROWS + at;
            bool there = col < of.n * a.group;
            uint32_t to = m.q + group * Q_GROUP + piece / 8 * (GROUP_ROWS * 128) + at * 128 +
                          ((piece ^ at) & 7) * 16;
            cp_async_cg_16(to, a.q + row_of(of, of_head, there ? col : 0) * HEAD_DIM + piece * 8,
                           there ? 16 : 0);
        }
        cp_async_commit_group();
    }

    __device__ __forceinline__ void await_q(void)
    {
        cp_async_wait_group<0>();
        fence_proxy_async_shared();
        bar_sync(1 + group, 128);
    }

    __device__ __forceinline__ void release(const ring<shape<TYPE>::STAGES> &from)
    {
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(m.empty + from.stage * 8);
    }

    /* s = q times the 128 keys of the ring's stage; queued. */
    __device__ __forceinline__ void scores(float s[64])
    {
        mbarrier_wait(m.full + r.stage * 8, r.phase);
        uint64_t q = wgmma_descriptor(m.q + group * Q_GROUP),
                 k = wgmma_descriptor(m.stages + r.stage * STAGE);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++)
            wgmma_m64n128k16_ss(s, q + step / 4 * (GROUP_ROWS * 128 / 16) + step % 4 * 2,
                                k + step / 4 * (HALF_STAGE / 16) + step % 4 * 2, step > 0);
        wgmma_commit_group();
    }

    /* oc += P of 8 k16 steps times the ring's stage; queued. */
    __device__ __forceinline__ void output(float oc[64], const uint32_t p[8][4], bool first)
    {
        mbarrier_wait(m.full + r.stage * 8, r.phase);
        uint64_t v = wgmma_descriptor_n(m.stages + r.stage * STAGE, HALF_STAGE);
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < 8; t++)
            wgmma_m64n128k16_rs_n(oc, p[t], v + t * (KV_ROWS * 128 / 16), !first || t > 0);
        wgmma_commit_group();
    }

    /* Scale, mask; mc = the larger of it and the rows' maxima. */
    __device__ __forceinline__ void scale(float s[64], float mc[2], int key0, int end, bool mask)
    {
#pragma unroll
        for (int i = 0; i < 64; i++)
            s[i] = __fmul_rn(s[i], a.scale);
        if (mask) {
            int last[2] = {pos_of(group * GROUP_ROWS + row), pos_of(group * GROUP_ROWS + row + 8)};
#pragma unroll
            for (int i = 0; i < 64; i++) {
                int key = key0 + i / 4 * 8 + c2 + i % 2;
                if (key >= end || key > last[i / 2 % 2]) s[i] = ATTN_NONE;
            }
        }
#pragma unroll
        for (int i = 0; i < 64; i++)
            mc[i / 2 % 2] = max_nan(mc[i / 2 % 2], s[i]);
    }

    /* P = bf16(exp(s - m)) as A fragments of 8 k16 steps; l: lanes 2c, 2c + 1, 2c + 8, 2c + 9 of
     * both rows. */
    __device__ __forceinline__ void weights(uint32_t p[8][4], float l[2][4], const float s[64],
                                            const float m_[2])
    {
#pragma unroll
        for (int t = 0; t < 8; t++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float *x = s + t * 8 + half * 4 + h * 2;
                    uint32_t u = bf16_pack(exp_weight(__fsub_rn(x[0], m_[h])),
                                           exp_weight(__fsub_rn(x[1], m_[h])));
                    p[t][half * 2 + h] = u;
                    l[h][half * 2] = __fadd_rn(l[h][half * 2], bf16_lo(u));
                    l[h][half * 2 + 1] = __fadd_rn(l[h][half * 2 + 1], bf16_hi(u));
                }
    }

    __device__ __forceinline__ void row_max(float mc[2])
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int w = 1; w < 4; w *= 2)
                mc[h] = max_nan(mc[h], __shfl_xor_sync(FULL_WARP, mc[h], w));
    }

    __device__ __forceinline__ void fold_chunk(const float oc[64], const float l[2][4],
                                               const float mc[2], bool first)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            struct fold f = fold_begin(&top[h], mc[h], first);
            sum[h] = fold_apply(sum[h], sum_of_chunk(sum_lanes(l[h]), mc[h]), f, mc[h], first);
            if (first) {
#pragma unroll
                for (int i = 0; i < 32; i++)
                    o[i / 2 * 4 + h * 2 + i % 2] = oc[i / 2 * 4 + h * 2 + i % 2];
            } else if (mc[h] != ATTN_NONE) {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    int at = i / 2 * 4 + h * 2 + i % 2;
                    o[at] = __fmaf_rn(oc[at], f.fresh, __fmul_rn(o[at], f.old));
                }
            }
        }
    }

    /* The warpgroups take turns to queue scores, so that they do not fall into step. */
    __device__ __forceinline__ void take_turn(void)
    {
        bar_sync(3 + group, 256);
    }

    __device__ __forceinline__ void give_turn(void)
    {
        bar_arrive(4 - group, 256);
    }

    /* TWO: the chunk reaches into its second 128 keys. */
    template <bool TWO>
    __device__ __forceinline__ void chunk(const struct chunk &c, bool first, bool last)
    {
        float s[TWO ? 2 : 1][64], mc[2] = {ATTN_NONE, ATTN_NONE}, l[2][4] = {};
        bool mask = c.key0 + (TWO ? 2 : 1) * STAGE_KEYS >
                    min(c.key0 + c.n, PREFIX ? span.n_keys : span.n_keys - span.n + 1);
        ring<shape<TYPE>::STAGES> k = r;
        take_turn();
        scores(s[0]);
        r.next();
        if (TWO) {
            scores(s[TWO]);
            r.next();
        }
        give_turn();
        if (TWO) {
            wgmma_wait_group<1>();
            release(k);
            k.next();
            scale(s[0], mc, c.key0, c.key0 + c.n, mask);
        }
        wgmma_wait_group<0>();
        release(k);
        if (last) { /* q is free */
            bar_sync(1 + group, 128);
            if (next_head >= 0) fetch_q(next, next_head);
        }
        scale(s[TWO], mc, c.key0 + (TWO ? STAGE_KEYS : 0), c.key0 + c.n, mask);
        row_max(mc);
        float m_[2] = {mc[0] == ATTN_NONE ? 0.0f : mc[0], mc[1] == ATTN_NONE ? 0.0f : mc[1]};
        uint32_t p[TWO ? 2 : 1][8][4];
        weights(p[0], l, s[0], m_);
        if (TWO) weights(p[TWO], l, s[TWO], m_);
        float oc[64];
        ring<shape<TYPE>::STAGES> v = r;
        output(oc, p[0], true);
        r.next();
        if (TWO) {
            output(oc, p[TWO], false);
            r.next();
        }
        wgmma_wait_group<0>();
        release(v);
        if (TWO) {
            v.next();
            release(v);
        }
        fold_chunk(oc, l, mc, first);
    }

    __device__ __forceinline__ float result(float sum_of_p_v, float sum_of_p)
    {
        float x = __fdiv_rn(sum_of_p_v, sum_of_p);
        return TYPE == KV_BF16 ? x : __fmul_rn(x, a.v_scale);
    }

    __device__ __forceinline__ void write(void)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int col = group * GROUP_ROWS + row + h * 8;
            if (col >= span.n * a.group) continue;
            size_t to = row_of(span, head, col);
#pragma unroll
            for (int j = 0; j < 16; j++) {
                float x = o[j * 4 + h * 2], y = o[j * 4 + h * 2 + 1];
                if (PREFIX)
                    *(float2 *)(a.state + to * HEAD_DIM + c2 + j * 8) = make_float2(x, y);
                else
                    *(uint32_t *)(a.out + to * HEAD_DIM + c2 + j * 8) =
                        bf16_pack(result(x, sum[h]), result(y, sum[h]));
            }
            if (PREFIX && c2 == 0) *(float2 *)(a.state_ml + to * 2) = make_float2(top[h], sum[h]);
        }
    }

    /* The next pair that has keys: next and next_head (-1: none). */
    __device__ __forceinline__ void find_next(int *n)
    {
        for (int pair; (pair = pair_at(a, *n)) != -1;) {
            ++*n;
            if (pair < 0) continue;
            next = a.spans[pair / a.n_kv_heads];
            next_head = pair % a.n_kv_heads;
            if (next.n_keys > 0) return;
        }
        next_head = -1;
    }

    __device__ __forceinline__ void run(void)
    {
        int n = 0;
        find_next(&n);
        if (next_head >= 0) fetch_q(next, next_head);
        if (group == 1) give_turn();
        while (next_head >= 0) {
            span = next;
            head = next_head;
            find_next(&n);
            int n_chunks = chunk_count(span.n_keys, a.first_chunk);
            await_q();
            for (int i = 0; i < n_chunks; i++) {
                struct chunk c = chunk_at(i, span.n_keys, a.first_chunk);
                if (c.n > STAGE_KEYS)
                    chunk<true>(c, i == 0, i == n_chunks - 1);
                else
                    chunk<false>(c, i == 0, i == n_chunks - 1);
            }
            write();
        }
        if (group == 0) take_turn();
    }
};

template <kv_type_t TYPE, bool PREFIX>
__device__ __forceinline__ void attend(const struct attn_args &a)
{
    using S = shape<TYPE>;
    extern __shared__ __align__(1024) char smem[];
    struct place m;
    m.q = smem_addr(smem);
    m.stages = m.q + 2 * Q_GROUP;
    m.raw = m.stages + S::STAGES * STAGE;
    m.full = m.raw + S::RAW_STAGES * RAW_STAGE;
    m.empty = m.full + S::STAGES * 8;
    m.raw_full = m.empty + S::STAGES * 8;
    m.raw_empty = m.raw_full + S::RAW_STAGES * 8;
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(m.full + i * 8, TYPE == KV_BF16 ? 1 : CONVERTERS);
            mbarrier_init(m.empty + i * 8, 8);
        }
        for (int i = 0; i < S::RAW_STAGES; i++) {
            mbarrier_init(m.raw_full + i * 8, 1);
            mbarrier_init(m.raw_empty + i * 8, CONVERTERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<S::FEW_REGS>();
        if (threadIdx.x < 32)
            produce<TYPE>(a, m);
        else if (TYPE == KV_E4M3)
            convert(a, m);
    } else {
        setmaxnreg_inc<S::MANY_REGS>();
        consumer<TYPE, PREFIX> c(a, m);
        c.run();
    }
}

#define ATTN(name, type, prefix)                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) \
        name(const __grid_constant__ struct attn_args a)     \
    {                                                        \
        attend<type, prefix>(a);                             \
    }
ATTN(attn_prefill_bf16_128, KV_BF16, false)
ATTN(attn_prefix_bf16_128, KV_BF16, true)
ATTN(attn_prefill_e4m3_128, KV_E4M3, false)
ATTN(attn_prefix_e4m3_128, KV_E4M3, true)
