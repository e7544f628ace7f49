/*
 * attn_items.cuh - the work of attn_columns.cuh: its shared memory, the walk over items, the
 * copying warp.
 */
#ifndef BACKEND_CUDA_ATTN_ITEMS_CUH
#define BACKEND_CUDA_ATTN_ITEMS_CUH

#include "backend/cuda/attn.cuh"
#include "backend/cuda/ptx.cuh"

enum {
    WARPS = 8,
    THREADS = WARPS * 32 + 32,
    STAGE_TILES = 4,
    CHUNK_TILES = ATTN_CHUNK / KV_ROWS,
    FOLD_AHEAD = 8, /* chunks whose results are loaded at once */
};

template <kv_type_t TYPE, int HEAD_DIM, int NT>
struct shape {
    static constexpr int COLS = NT * 8;
    static constexpr int STEPS =
        HEAD_DIM / 16; /* k16 steps of the scores, d blocks of the output */
    static constexpr int OWN = (STEPS + WARPS - 1) / WARPS; /* d blocks a warp */
    static constexpr uint32_t TILE = KV_ROWS * HEAD_DIM * (TYPE == KV_BF16 ? 2 : 1);
    static constexpr uint32_t STAGE = TILE * STAGE_TILES;
    static constexpr uint32_t Q_BYTES = STEPS * NT * 32 * 8;
    static constexpr uint32_t P_BYTES = CHUNK_TILES * NT * 32 * 8;
    static constexpr int AHEAD =
        NT <= 2 ? (STEPS * NT + WARPS - 1) / WARPS : 0; /* of the next q, a thread */
    static constexpr int STAGES = ATTN_STAGES(TYPE, HEAD_DIM, NT);
    static_assert(STAGE == ATTN_STAGE_BYTES(TYPE, HEAD_DIM), "kernels.h");
    static_assert(Q_BYTES + P_BYTES + COLS * 4 * (WARPS + 2) + ATTN_STAGES_MAX * 16 ==
                      ATTN_FIXED_BYTES(HEAD_DIM, NT),
                  "kernels.h");
    static_assert(STAGES >= 4, "warps wait for a chunk's four K stages at once");
};

/* Shared memory, in this order. */
template <class S>
struct map {
    uint32_t stages, full, empty;
    uint2 *q, *p;
    float *warp_max, *total;
    int32_t *pos;
    __device__ __forceinline__ map(char *smem)
    {
        stages = smem_addr(smem);
        q = (uint2 *)(smem + S::STAGES * S::STAGE);
        p = q + S::Q_BYTES / 8;
        warp_max = (float *)(p + S::P_BYTES / 8);
        total = warp_max + WARPS * S::COLS;
        pos = (int32_t *)(total + S::COLS);
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
    __device__ __forceinline__ ring plus(int n) const
    {
        ring r = *this;
        for (int i = 0; i < n; i++)
            r.next();
        return r;
    }
};

/* A walk over items; chunks count from the end of the shared prefix. */
struct cursor {
    int block, head, chunk, n_chunks;
    struct attn_span span;
    __device__ __forceinline__ void load(const struct attn_args &a)
    {
        span = a.spans[block];
        n_chunks = chunk_count(span.n_keys, a.first_chunk) - span.prefix;
    }
    __device__ __forceinline__ struct chunk keys(const struct attn_args &a) const
    {
        return chunk_at(chunk + span.prefix, span.n_keys, a.first_chunk);
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
__device__ __forceinline__ void produce(const struct attn_args &a,
                                        const map<shape<TYPE, HEAD_DIM, NT>> &m, int begin, int end)
{
    using S = shape<TYPE, HEAD_DIM, NT>;
    int lane = threadIdx.x & 31;
    ring<S::STAGES> r = {0, 1};
    struct cursor at;
    at.find(a, begin);
    for (int item = begin; item < end; item++, at.next(a)) {
        struct chunk c = at.keys(a);
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
                                  base + (own * a.n_kv_heads + at.head) * S::TILE, S::TILE,
                                  m.full + r.stage * 8);
            }
        }
    }
}

#endif
