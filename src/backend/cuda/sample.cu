/*
 * sample.cu - model/sample.c on the device: the same token ids for the same logits.
 *
 *   sample_adjust   a block a row: penalties, bias, barred ids (leaves at once where there are
 *                   none)
 *   sample_scan     (blocks of 4096 logits, rows): divide by the temperature; maximum, its first
 *                   place, what is not finite
 *   sample_measure  (the same grid): exp(x - max) and its sum by 16 lanes; the draw where nothing
 *                   filters
 *   sample_finish   sample_finish.cu
 *
 *   memory   measure: 4096 f32
 *   bound    bytes: 4 a logit and pass, two passes, three with a temperature
 */
#include "backend/cuda/sample.cuh"

/* --- adjust */

__device__ __forceinline__ void penalise(const struct sample_spec &s, float *x, uint32_t *counts,
                                         int vocab)
{
    for (int i = threadIdx.x; i < s.n_output; i += THREADS) {
        int32_t id = s.output_ids[i];
        if (id >= 0 && id < vocab) atomicAdd(counts + id, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < s.n_output; i += THREADS) {
        int32_t id = s.output_ids[i];
        uint32_t n = id >= 0 && id < vocab ? atomicExch(counts + id, 0) : 0;
        if (n == 0) continue; /* another thread has this id */
        float v = __fsub_rn(x[id], __fmul_rn(s.frequency_penalty, (float)n));
        v = __fsub_rn(v, s.presence_penalty);
        x[id] = v > 0.0f ? __fdiv_rn(v, s.repetition_penalty) : __fmul_rn(v, s.repetition_penalty);
    }
    __syncthreads();
}

/* lowered[row] = {finite logits that became -inf, others that did}. */
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_adjust(const __grid_constant__ struct sample_args a)
{
    __shared__ int32_t n[2];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const struct sample_spec &s = a.specs[blockIdx.x];
    float *x = a.logits + blockIdx.x * a.ld;
    if (threadIdx.x < 2) n[threadIdx.x] = 0;
    __syncthreads();
    bool penalties =
        s.frequency_penalty != 0.0f || s.presence_penalty != 0.0f || s.repetition_penalty != 1.0f;
    if (!scored(s)) {
        if (penalties && s.n_output > 0)
            penalise(s, x, a.counts + (size_t)blockIdx.x * a.vocab, a.vocab);
        for (int i = threadIdx.x; i < s.n_bias; i += THREADS)
            if (s.bias_ids[i] >= 0 && s.bias_ids[i] < a.vocab)
                x[s.bias_ids[i]] = __fadd_rn(x[s.bias_ids[i]], s.bias[i]);
        __syncthreads();
        for (int i = threadIdx.x; i < s.n_barred; i += THREADS) {
            if (s.barred[i] < 0 || s.barred[i] >= a.vocab) continue;
            float old = atomicExch(x + s.barred[i], MINUS_INF);
            if (old != MINUS_INF) atomicAdd(&n[isfinite(old) ? 0 : 1], 1);
        }
    }
    __syncthreads();
    if (threadIdx.x < 2) a.lowered[blockIdx.x * 2 + threadIdx.x] = n[threadIdx.x];
}

/* --- scan */

__device__ __forceinline__ void load_part(float v[EACH], const float *x, int vocab)
{
    int base = blockIdx.x * PART;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        int at = base + (i / 4 * THREADS + threadIdx.x) * 4;
        float4 f = make_float4(MINUS_INF, MINUS_INF, MINUS_INF, MINUS_INF);
        if (at + 3 < vocab) {
            f = *(const float4 *)(x + at);
        } else {
            if (at < vocab) f.x = x[at];
            if (at + 1 < vocab) f.y = x[at + 1];
            if (at + 2 < vocab) f.z = x[at + 2];
        }
        v[i] = f.x, v[i + 1] = f.y, v[i + 2] = f.z, v[i + 3] = f.w;
    }
}

/* Place of element i of load_part within the part. */
__device__ __forceinline__ int part_place(int i)
{
    return (i / 4 * THREADS + threadIdx.x) * 4 + i % 4;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_scan(const __grid_constant__ struct sample_args a)
{
    __shared__ struct draw room[THREADS / 32];
    __shared__ int32_t n[2];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const struct sample_spec &s = a.specs[blockIdx.y];
    float *x = a.logits + blockIdx.y * a.ld, v[EACH];
    if (threadIdx.x < 2) n[threadIdx.x] = 0;
    load_part(v, x, a.vocab);
    bool divide = !scored(s) && s.temperature > 0.0f;
    int n_low = 0, n_bad = 0, base = blockIdx.x * PART;
    struct draw best = {0.0f, -1};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int id = base + part_place(i);
        if (id >= a.vocab) continue;
        n_low += v[i] == MINUS_INF;
        n_bad += !isfinite(v[i]) && v[i] != MINUS_INF;
        if (divide) x[id] = v[i] = __fdiv_rn(v[i], s.temperature);
        best = better(best, {v[i], id});
    }
    best = block_best<THREADS>(best, room);
    n_low = __reduce_add_sync(FULL_WARP, n_low);
    n_bad = __reduce_add_sync(FULL_WARP, n_bad);
    if ((threadIdx.x & 31) == 0 && (n_low | n_bad)) {
        atomicAdd(&n[0], n_low);
        atomicAdd(&n[1], n_bad);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        a.parts[blockIdx.y * gridDim.x + blockIdx.x] = {best.score, best.id, n[0], n[1],
                                                        0.0f,       0.0f,    -1};
}

/* --- measure */

/* kernels.inc, exp_sum, one block of 4096; by one warp. */
__device__ __forceinline__ float lane_sum(const float *e)
{
    float acc = 0.0f;
#pragma unroll 16
    for (int i = threadIdx.x & 15; i < PART; i += 16)
        acc = __fadd_rn(acc, e[i]);
    return lanes_sum(acc);
}

/*
 * The best of this block's ids with e >= min_p.  `top` is the row's maximum and bounds the search:
 * to beat its score B an id needs -log(u) <= exp(x - B), and 1 - u <= -log(u); both sides with room
 * for rounding.  That leaves a handful of ids for the double logarithms.
 */
__device__ __forceinline__ struct draw draw_part(const struct sample_spec &s, const float *x,
                                                 const float *e, struct draw top, int vocab)
{
    uint64_t key = noise_key(s);
    float bound = __fadd_rn(top.score, gumbel(noise_bits(key, top.id)));
    float reach =
        __expf(top.score - bound + 1e-3f + 4e-7f * fabsf(top.score) + 4e-7f * fabsf(bound));
    int base = blockIdx.x * PART;
    uint32_t able = 0; /* bit i: element i may win */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int id = base + part_place(i);
        float p = e[part_place(i)];
        if (id >= vocab || !(p >= s.min_p) || !(p * reach >= 0x1p-34f)) continue;
        if ((float)~noise_bits(key, id) * 0x1p-32f <= p * reach + 0x1p-30f) able |= 1u << i;
    }
    struct draw best = {bound, top.id};
    for (; able; able &= able - 1) {
        int id = base + part_place(__ffs(able) - 1);
        if (x[id] != MINUS_INF)
            best = better(best, {__fadd_rn(x[id], gumbel(noise_bits(key, id))), id});
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_measure(const __grid_constant__ struct sample_args a)
{
    __shared__ __align__(16) float e[PART];
    __shared__ struct draw room[THREADS / 32];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const struct sample_spec &s = a.specs[blockIdx.y];
    struct sample_part *parts = a.parts + blockIdx.y * gridDim.x;
    struct draw top = row_max(parts, gridDim.x);
    if (!isfinite(top.score)) return; /* nothing to measure */
    float v[EACH];
    load_part(v, a.logits + blockIdx.y * a.ld, a.vocab);
#pragma unroll
    for (int i = 0; i < EACH; i += 4)
        *(float4 *)(e + part_place(i)) = make_float4(exp_cpu<true>(__fsub_rn(v[i], top.score)),
                                                     exp_cpu<true>(__fsub_rn(v[i + 1], top.score)),
                                                     exp_cpu<true>(__fsub_rn(v[i + 2], top.score)),
                                                     exp_cpu<true>(__fsub_rn(v[i + 3], top.score)));
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = lane_sum(e);
        if (threadIdx.x == 0) parts[blockIdx.x].sum = sum;
    }
    if (!drawn_from_all(s, a.vocab)) return;
    struct draw best =
        block_best<THREADS>(draw_part(s, a.logits + blockIdx.y * a.ld, e, top, a.vocab), room);
    if (threadIdx.x == 0) {
        parts[blockIdx.x].score = best.score;
        parts[blockIdx.x].drawn = best.id;
    }
}
