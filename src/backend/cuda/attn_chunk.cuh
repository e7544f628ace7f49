/*
 * attn_chunk.cuh - a chunk's arithmetic for few query columns: q, scores, maxima, P, row sums,
 * fold.
 */
#ifndef BACKEND_CUDA_ATTN_CHUNK_CUH
#define BACKEND_CUDA_ATTN_CHUNK_CUH

#include "backend/cuda/attn_items.cuh"
#include "backend/cuda/fragment.cuh"

/* One thread's part of it: warps 0-7.  Its columns are those of its accumulators: n * 8 + c2 + i.
 */
template <kv_type_t TYPE, int HEAD_DIM, int NT>
struct columns {
    using S = shape<TYPE, HEAD_DIM, NT>;
    const struct attn_args &a;
    const map<S> m;
    struct cursor at;
    int warp, lane, g, c2;  /* row of an accumulator, first column of it */
    float o[S::OWN][NT][4]; /* folded output */
    float top[NT][2];       /* maximum of the columns so far */
    struct fold f[NT][2];   /* how the chunk joins */
    float chunk_max[NT][2];
    /* The same of column block `warp`, in warps below NT, and its row sums. */
    float own_top[2], own_max[2], sum[2], chunk_sum[2];
    struct fold own[2];
    uint2 ahead[S::AHEAD + 1]; /* q of the next pair */

    __device__ __forceinline__ columns(const struct attn_args &args, const map<S> &map_)
        : a(args), m(map_), warp(threadIdx.x / 32), lane(threadIdx.x & 31), g(lane >> 2),
          c2((lane & 3) * 2)
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

    __device__ __forceinline__ size_t row_of(const struct cursor &p,
                                             int col) /* of q and out, in heads */
    {
        size_t token = p.span.token + col / a.group;
        return token * (a.n_kv_heads * a.group) + p.head * a.group + col % a.group;
    }

    /* B fragment i of q, 0 past the last column. */
    __device__ __forceinline__ uint2 q_fragment(const struct cursor &p, int i)
    {
        int col = i / 32 % NT * 8 + g, step = i / 32 / NT;
        if (i >= S::STEPS * NT * 32 || col >= p.span.n * a.group) return make_uint2(0, 0);
        const uint16_t *q = a.q + row_of(p, col) * HEAD_DIM;
        return make_uint2(*(const uint32_t *)(q + q_elem<TYPE>(step, 0)),
                          *(const uint32_t *)(q + q_elem<TYPE>(step, 1)));
    }

    __device__ __forceinline__ void fetch_ahead(const struct cursor &p)
    {
#pragma unroll
        for (int i = 0; i < S::AHEAD; i++)
            ahead[i] = q_fragment(p, threadIdx.x + i * WARPS * 32);
    }

    /* q of all columns to shared memory, and the columns' positions.  All warps are past the
     * last pair's scores. */
    __device__ __forceinline__ void start_pair(void)
    {
#pragma unroll
        for (int i = 0; i < S::AHEAD; i++)
            if (threadIdx.x + i * WARPS * 32 < S::STEPS * NT * 32)
                m.q[threadIdx.x + i * WARPS * 32] = ahead[i];
        if (S::AHEAD == 0)
            for (int i = threadIdx.x; i < S::STEPS * NT * 32; i += WARPS * 32)
                m.q[i] = q_fragment(at, i);
        int col = threadIdx.x, first = at.span.n_keys - at.span.n;
        if (col < S::COLS) m.pos[col] = col < n_cols() ? first + col / a.group : at.span.n_keys - 1;
        sync();
    }

    /* (m, l, O) of the shared prefix. */
    __device__ __forceinline__ void load_state(void)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            size_t row = row_of(at, warp < NT ? min(warp * 8 + c2 + i, n_cols() - 1) : 0);
            own_top[i] = a.state_ml[row * 2];
            sum[i] = a.state_ml[row * 2 + 1];
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                size_t row = row_of(at, min(n * 8 + c2 + i, n_cols() - 1));
                top[n][i] = a.state_ml[row * 2];
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (warp + d * WARPS < S::STEPS)
                            o[d][n][h * 2 + i] =
                                a.state[row * HEAD_DIM + elem_of_row<TYPE>(warp + d * WARPS, h)];
            }
    }

    /* s = scaled scores of two neighbouring tiles, -inf where a key is none or comes after the
     * column's token. */
    __device__ __forceinline__ void scores(float s[2][NT][4], uint32_t tile, int key0, int end)
    {
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[t][n][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < S::STEPS; step += 4) {
            uint32_t k[2][4][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                k_fragments<TYPE>(k[i / 2] + i % 2 * 2, tile + i / 2 * S::TILE, step / 2 + i % 2);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint2 b = m.q[((step + i) * NT + n) * 32 + lane];
                    uint32_t q[2] = {b.x, b.y};
                    mma_m16n8k16_bf16(s[0][n], k[0][i], q);
                    mma_m16n8k16_bf16(s[1][n], k[1][i], q);
                }
        }
        bool all =
            key0 + 2 * KV_ROWS <= end && key0 + 2 * KV_ROWS <= at.span.n_keys - at.span.n + 1;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[t][n][i] = __fmul_rn(s[t][n][i], a.scale);
        if (all) return;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = key0 + t * KV_ROWS + g + i / 2 * 8;
                    if (key >= end || key > m.pos[n * 8 + c2 + i % 2]) s[t][n][i] = ATTN_NONE;
                }
    }

    /* The warp's maximum of each column to shared memory. */
    __device__ __forceinline__ void warp_maxima(float s[2][NT][4])
    {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[i] = max_nan(max_nan(s[0][n][i], s[0][n][i + 2]),
                               max_nan(s[1][n][i], s[1][n][i + 2]));
#pragma unroll
                for (int w = 4; w < 32; w *= 2)
                    x[i] = max_nan(x[i], __shfl_xor_sync(FULL_WARP, x[i], w));
            }
            if (lane < 4)
                *(float2 *)&m.warp_max[warp * S::COLS + n * 8 + c2] = make_float2(x[0], x[1]);
        }
    }

    __device__ __forceinline__ void block_max(float out[2], int block)
    {
        out[0] = out[1] = ATTN_NONE;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float2 x = *(const float2 *)&m.warp_max[w * S::COLS + block * 8 + c2];
            out[0] = max_nan(out[0], x.x);
            out[1] = max_nan(out[1], x.y);
        }
    }

    /* The chunk's maxima and how it joins; every thread for its columns. */
    __device__ __forceinline__ void column_step(bool first)
    {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            block_max(chunk_max[n], n);
#pragma unroll
            for (int i = 0; i < 2; i++)
                f[n][i] = fold_begin(&top[n][i], chunk_max[n][i], first);
        }
        if (warp >= NT) return;
        block_max(own_max, warp);
#pragma unroll
        for (int i = 0; i < 2; i++)
            own[i] = fold_begin(&own_top[i], own_max[i], first);
    }

    /* P of one tile as B fragments to shared memory. */
    __device__ __forceinline__ void write_p(const float s[NT][4], int tile)
    {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float mc = chunk_max[n][i % 2];
                p[i] = exp_weight(__fsub_rn(s[n][i], mc == ATTN_NONE ? 0.0f : mc));
            }
            m.p[(tile * NT + n) * 32 + lane] = make_uint2(movmatrix_trans(bf16_pack(p[0], p[1])),
                                                          movmatrix_trans(bf16_pack(p[2], p[3])));
        }
    }

    /* Lanes 2c, 2c + 1, 2c + 8, 2c + 9 of column g. */
    __device__ __forceinline__ void sum_tile(float l[4], uint2 p)
    {
        l[0] = __fadd_rn(l[0], bf16_lo(p.x));
        l[1] = __fadd_rn(l[1], bf16_hi(p.x));
        l[2] = __fadd_rn(l[2], bf16_lo(p.y));
        l[3] = __fadd_rn(l[3], bf16_hi(p.y));
    }

    /* chunk_sum = the lanes' sum, moved from column g to columns c2, c2 + 1. */
    __device__ __forceinline__ void sum_columns(const float l[4])
    {
        float x = sum_lanes(l);
        chunk_sum[0] = sum_of_chunk(__shfl_sync(FULL_WARP, x, c2 * 4), own_max[0]);
        chunk_sum[1] = sum_of_chunk(__shfl_sync(FULL_WARP, x, c2 * 4 + 4), own_max[1]);
    }

    __device__ __forceinline__ void fold_into(const float acc[S::OWN][NT][4], bool first)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            sum[i] = fold_apply(sum[i], chunk_sum[i], own[i], own_max[i], first);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int d = 0; d < S::OWN; d++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        o[d][n][h * 2 + i] = fold_apply(o[d][n][h * 2 + i], acc[d][n][h * 2 + i],
                                                        f[n][i], chunk_max[n][i], first);
            }
    }

    __device__ __forceinline__ uint16_t result(float sum_of_p_v, float sum_of_p)
    {
        float x = __fdiv_rn(sum_of_p_v, sum_of_p);
        return f32_bf16(TYPE == KV_BF16 ? x : __fmul_rn(x, a.v_scale));
    }
};

#endif
