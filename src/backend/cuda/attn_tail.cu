/*
 * attn_tail.cu - decode of sequences that share a part of a chunk: its shared tiles are read once
 * for up to 8 of them.
 *
 *   grid     (2 x blocks of the shared prefix, KV heads): a block half of those tokens; 8 warps
 *   memory   [q, then P][shared tiles, then each sequence's own]: K of all, then V in their place
 *   roles    attn_columns.cuh's, with column block n being sequence n: scores of two shared tiles
 *            for all columns and of the own tiles of sequence `warp`; output of 16 of head_dim for
 *            all, over the shared tiles, then over each sequence's own
 *   bound    bytes of the own tiles; K and V come one after the other, nothing hides the first wait
 */
#include "backend/cuda/attn_chunk.cuh"

enum { SEQS = ATTN_TAIL_SEQS, COLS_EACH = 8, OWN_MAX = ATTN_TAIL_OWN, FAR = 1 << 29 };

template <kv_type_t TYPE>
struct tail : columns<TYPE, 128, SEQS> {
    using C = columns<TYPE, 128, SEQS>;
    using S = shape<TYPE, 128, SEQS>;
    using C::a;
    using C::at;
    using C::lane;
    using C::m;
    using C::o;
    using C::warp;

    int shared, more, before,
        n_keys;                      /* of sequence lane % 8: its tiles, those in front, its keys */
    bool last;                       /* and whether this is its last chunk */
    int my_more, my_before, my_keys; /* of sequence `warp` */
    uint32_t k, v, full;
    float2 *own_room; /* [sequence][4] maxima of own tiles */

    __device__ __forceinline__ tail(const struct attn_args &args, const map<S> &map_)
        : C(args, map_)
    {
    }

    __device__ __forceinline__ static map<S> places(char *smem)
    {
        map<S> m(smem);
        m.q = m.p = (uint2 *)smem;
        m.warp_max = (float *)(smem + S::P_BYTES + ATTN_TAIL_TILES * S::TILE);
        m.total = m.warp_max + WARPS * S::COLS;
        m.pos = (int32_t *)(m.total + S::COLS);
        return m;
    }

    /* Which tiles there are. */
    __device__ __forceinline__ void count(const struct attn_tail_args &t,
                                          const struct attn_block &b, int n)
    {
        int j = lane % SEQS, key0 = b.prefix * ATTN_CHUNK;
        int rest = j < n ? t.pos[at.span.token + j] + 1 - key0 : 0;
        shared = b.tail;
        last = rest <= ATTN_CHUNK;
        n_keys = min(rest, ATTN_CHUNK);
        more = j < n ? (n_keys + KV_ROWS - 1) / KV_ROWS - shared : 0;
        before = 0;
        for (int i = 0; i < SEQS; i++) {
            int x = __shfl_sync(FULL_WARP, more, i);
            if (i < j) before += x;
        }
        my_more = __shfl_sync(FULL_WARP, more, warp);
        my_before = __shfl_sync(FULL_WARP, before, warp);
        my_keys = __shfl_sync(FULL_WARP, n_keys, warp);
    }

    __device__ __forceinline__ int slots(void)
    {
        return shared + __shfl_sync(FULL_WARP, before + more, SEQS - 1);
    }

    /* This warp's tiles: two of the shared ones by its first lanes, its sequence's own. */
    __device__ __forceinline__ void copy(const void *from, uint32_t to, uint32_t bar, int page,
                                         int slot)
    {
        if (slot >= 0)
            cp_async_bulk(to + slot * S::TILE,
                          (const char *)from + ((size_t)page * a.n_kv_heads + at.head) * S::TILE,
                          S::TILE, bar);
    }

    __device__ __forceinline__ void own_scores(float s[OWN_MAX][4])
    {
#pragma unroll
        for (int u = 0; u < OWN_MAX; u++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[u][i] = 0.0f;
            if (u >= my_more) continue;
            uint32_t tile = k + (shared + my_before + u) * S::TILE;
#pragma unroll
            for (int step = 0; step < S::STEPS; step += 2) {
                uint32_t f[2][4];
                k_fragments<TYPE>(f, tile, step / 2);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint2 b = m.q[((step + i) * SEQS + warp) * 32 + lane];
                    uint32_t q[2] = {b.x, b.y};
                    mma_m16n8k16_bf16(s[u], f[i], q);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < OWN_MAX; u++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = (shared + u) * KV_ROWS + lane / 4 + i / 2 * 8;
                s[u][i] = u < my_more && key < my_keys ? __fmul_rn(s[u][i], a.scale) : ATTN_NONE;
            }
    }

    __device__ __forceinline__ void own_maxima(const float s[OWN_MAX][4])
    {
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[i] = ATTN_NONE;
#pragma unroll
            for (int u = 0; u < OWN_MAX; u++)
                x[i] = max_nan(x[i], max_nan(s[u][i], s[u][i + 2]));
#pragma unroll
            for (int w = 4; w < 32; w *= 2)
                x[i] = max_nan(x[i], __shfl_xor_sync(FULL_WARP, x[i], w));
        }
        if (lane < 4) own_room[warp * 4 + lane] = make_float2(x[0], x[1]);
    }

    /* As column_step, with the own tiles' maxima. */
    __device__ __forceinline__ void join(float max[2], int block)
    {
        this->block_max(max, block);
        float2 x = own_room[block * 4 + (lane & 3)];
        max[0] = max_nan(max[0], x.x);
        max[1] = max_nan(max[1], x.y);
    }

    __device__ __forceinline__ void columns(void)
    {
#pragma unroll
        for (int n = 0; n < SEQS; n++) {
            join(this->chunk_max[n], n);
#pragma unroll
            for (int i = 0; i < 2; i++)
                this->f[n][i] = fold_begin(&this->top[n][i], this->chunk_max[n][i], false);
        }
        join(this->own_max, warp);
#pragma unroll
        for (int i = 0; i < 2; i++)
            this->own[i] = fold_begin(&this->own_top[i], this->own_max[i], false);
    }

    __device__ __forceinline__ void write_own_p(const float s[OWN_MAX][4])
    {
#pragma unroll
        for (int u = 0; u < OWN_MAX; u++) {
            if (u >= my_more) break;
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float mc = this->own_max[i % 2];
                p[i] = exp_weight(__fsub_rn(s[u][i], mc == ATTN_NONE ? 0.0f : mc));
            }
            m.p[((shared + u) * SEQS + warp) * 32 + lane] = make_uint2(
                movmatrix_trans(bf16_pack(p[0], p[1])), movmatrix_trans(bf16_pack(p[2], p[3])));
        }
    }

    /* P V of tiles [tile, tile + n) of columns block `c`, whose V begin at `slot`. */
    __device__ __forceinline__ void output_own(float acc[4], int c, int slot, int n)
    {
#pragma unroll 1
        for (int u = 0; u < n; u += 2) {
            uint32_t f[2][4];
            v_fragments<TYPE>(f, v + (slot + u) * S::TILE, S::TILE, warp);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                if (u + t >= n) break;
                uint2 b = m.p[((shared + u + t) * SEQS + c) * 32 + lane];
                uint32_t p[2] = {b.x, b.y};
                mma_m16n8k16_bf16(acc, f[t], p);
            }
        }
    }

    __device__ __forceinline__ void output_all(float acc[1][SEQS][4])
    {
#pragma unroll
        for (int n = 0; n < SEQS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[0][n][i] = 0.0f;
#pragma unroll 1
        for (int u = 0; u < shared; u += 2) {
            uint32_t f[2][4];
            v_fragments<TYPE>(f, v + u * S::TILE, S::TILE, warp);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                if (u + t >= shared) break;
#pragma unroll
                for (int n = 0; n < SEQS; n++) {
                    uint2 b = m.p[((u + t) * SEQS + n) * 32 + lane];
                    uint32_t p[2] = {b.x, b.y};
                    mma_m16n8k16_bf16(acc[0][n], f[t], p);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < SEQS; n++)
            output_own(acc[0][n], n, shared + __shfl_sync(FULL_WARP, before, n),
                       __shfl_sync(FULL_WARP, more, n));
        float l[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int t = 0; t < shared + my_more; t++)
            this->sum_tile(l, m.p[(t * SEQS + warp) * 32 + lane]);
        this->sum_lanes(l);
    }

    /* Out where the chunk was the last one, else the state for what follows. */
    __device__ __forceinline__ void put(int n_tokens)
    {
        int c2 = this->c2;
        if (lane < 4)
            *(float2 *)&m.total[warp * COLS_EACH + c2] = make_float2(this->sum[0], this->sum[1]);
        this->sync();
#pragma unroll
        for (int n = 0; n < SEQS; n++) {
            bool ends = __shfl_sync(FULL_WARP, last, n);
            if (n >= n_tokens) break;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int col = n * COLS_EACH + c2 + i % 2;
                size_t to = this->row_of(at, col) * 128 + elem_of_row<TYPE>(warp, i / 2);
                if (ends)
                    a.out[to] = this->result(o[0][n][i], m.total[col]);
                else
                    a.state[to] = o[0][n][i];
            }
        }
        if (warp >= n_tokens || __shfl_sync(FULL_WARP, last, warp) || lane >= 4) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *ml = a.state_ml + this->row_of(at, warp * COLS_EACH + c2 + i) * 2;
            ml[0] = this->own_top[i];
            ml[1] = this->sum[i];
        }
    }

    __device__ __forceinline__ void run(const struct attn_tail_args &t, const struct attn_block &b,
                                        int n)
    {
        count(t, b, n);
        uint32_t bytes = slots() * S::TILE;
        if (threadIdx.x == 0) {
            mbarrier_init(full, 1);
            mbarrier_init(full + 8, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(full, bytes);
            mbarrier_arrive_expect_tx(full + 8, bytes);
        }
        /* This lane's copy, if any: of a shared tile, or (lanes from 2 on) of an own one. */
        int u = lane - 2, slot = -1, tile = 0, of = min(warp, n - 1);
        if (lane < 2 && warp * 2 + lane < shared) {
            slot = tile = warp * 2 + lane;
            of = 0;
        } else if (lane >= 2 && u < my_more) {
            slot = shared + my_before + u;
            tile = shared + u;
        }
        int page =
            a.tables[t.seq[at.span.token + of] * a.table_ld + b.prefix * (int)CHUNK_TILES + tile];
        __syncthreads();
        copy(a.k, k, full, page, slot);
        this->load_state();
        this->start_pair();
        float s[2][SEQS][4], so[OWN_MAX][4], acc[1][SEQS][4];
        mbarrier_wait(full, 0);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < SEQS; c++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[h][c][i] = ATTN_NONE;
        if (warp * 2 < shared) this->scores(s, k + warp * 2 * S::TILE, 0, FAR);
        if (warp * 2 + 1 >= shared)
#pragma unroll
            for (int c = 0; c < SEQS; c++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[1][c][i] = ATTN_NONE;
        own_scores(so);
        this->warp_maxima(s);
        own_maxima(so);
        this->sync();
        copy(a.v, v, full + 8, page, slot); /* all are done with K */
        columns();
        if (warp * 2 < shared) this->write_p(s[0], warp * 2);
        if (warp * 2 + 1 < shared) this->write_p(s[1], warp * 2 + 1);
        write_own_p(so);
        this->sync();
        mbarrier_wait(full + 8, 0);
        output_all(acc);
        this->fold_into(acc, false);
        put(n);
    }
};

template <kv_type_t TYPE>
__device__ __forceinline__ void attend_tail(const struct attn_tail_args &t)
{
    extern __shared__ __align__(1024) char smem[];
    using T = tail<TYPE>;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    struct attn_block b = t.blocks[blockIdx.x / 2];
    int first = blockIdx.x % 2 * SEQS, n = min(SEQS, b.n - first);
    if (b.tail == 0 || n <= 0) return;
    T c(t.attn, T::places(smem));
    c.at.span = {0, b.token + first, n, 0, FAR * 2 - 1, b.prefix};
    c.at.head = blockIdx.y;
    c.k = smem_addr(smem) + T::S::Q_BYTES;
    c.v = smem_addr(smem) + T::S::P_BYTES;
    c.own_room = (float2 *)(c.m.pos + T::S::COLS);
    c.full = smem_addr(c.own_room + SEQS * 4);
    c.run(t, b, n);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    attn_tail_bf16(const __grid_constant__ struct attn_tail_args t)
{
    attend_tail<KV_BF16>(t);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    attn_tail_e4m3(const __grid_constant__ struct attn_tail_args t)
{
    attend_tail<KV_E4M3>(t);
}
