/*
 * rope.cu - norm and rotate the heads of q and k, write k and v to their pages.
 *
 *   grid     (tokens, ceil((n_heads + 2 n_kv_heads) / 8)), 128 threads: half a warp a head
 *   memory   none shared: thread j holds elements j, j + 16, ... of its head, which are lane j of
 *            the norm's sum and both partners of the half-split rotation
 *   bound    bytes: 4 a value of qkv read, 2 of q, 2 or 1 of k and v written
 *
 * K is rounded once, from f32 to the KV type; q to BF16.
 */
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/rope.cuh"

enum { ROPE_THREADS = 128, ROPE_HEADS = ROPE_THREADS / 16 };

/* Everything that needs no arithmetic is on its way before the first sum: norm weights before the
 * wait, angles and page as soon as position and sequence are there. */
template <kv_type_t TYPE, int HEAD_DIM>
__device__ __forceinline__ void rope_heads(const struct rope_args &a)
{
    constexpr int E = HEAD_DIM / 16;
    griddepcontrol_launch_dependents();
    int lane = threadIdx.x & 15, unit = blockIdx.y * ROPE_HEADS + threadIdx.x / 16;
    int n_units = a.n_heads + 2 * a.n_kv_heads;
    int head = unit - a.n_heads; /* >= 0: a k or v head */
    bool is_v = head >= a.n_kv_heads;
    size_t token = blockIdx.x;
    float x[E], w[E], cs[E / 2], sn[E / 2];
#pragma unroll
    for (int i = 0; i < E; i++)
        w[i] = is_v ? 0.0f : bf16_f32((head < 0 ? a.q_norm : a.k_norm)[lane + 16 * i]);
    griddepcontrol_wait();
    bool active = unit < n_units; /* the others stay for the sum */
    int32_t pos = a.pos[token], seq = a.seq[token];
#pragma unroll
    for (int i = 0; i < E; i++)
        x[i] = active ? a.qkv[token * a.ld + (size_t)unit * HEAD_DIM + lane + 16 * i] : 0.0f;
    active &= seq >= 0;
    size_t page = 0, angle = active ? (size_t)pos * (HEAD_DIM / 2) : 0;
    if (active && head >= 0) page = a.tables[seq * a.table_ld + pos / KV_ROWS];
#pragma unroll
    for (int i = 0; i < E / 2; i++) {
        cs[i] = a.cos[angle + lane + 16 * i];
        sn[i] = a.sin[angle + lane + 16 * i];
    }
    float inv = head_rms<E>(x, a.eps);
    if (!active) return;
    if (!is_v) norm_rotate<E>(x, inv, w, cs, sn);
    if (head < 0) {
        uint16_t *q = a.q + (token * a.n_heads + unit) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < E; i++)
            q[lane + 16 * i] = f32_bf16(x[i]);
        return;
    }
    if (is_v) head -= a.n_kv_heads;
    size_t tile = (page * a.n_kv_heads + head) * (KV_ROWS * HEAD_DIM * (TYPE == KV_BF16 ? 2 : 1));
    write_kv<TYPE, E>((char *)(is_v ? a.v : a.k) + tile, pos % KV_ROWS, x,
                      is_v ? a.v_scale : a.k_scale);
}

#define ROPE(name, type, head_dim)                             \
    extern "C" __global__ void __launch_bounds__(ROPE_THREADS) \
        name(const __grid_constant__ struct rope_args a)       \
    {                                                          \
        rope_heads<type, head_dim>(a);                         \
    }
ROPE(rope_bf16_64, KV_BF16, 64)
ROPE(rope_bf16_128, KV_BF16, 128)
ROPE(rope_bf16_256, KV_BF16, 256)
ROPE(rope_e4m3_64, KV_E4M3, 64)
ROPE(rope_e4m3_128, KV_E4M3, 128)
ROPE(rope_e4m3_256, KV_E4M3, 256)
