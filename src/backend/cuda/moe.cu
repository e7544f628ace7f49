/*
 * moe.cu - see moe.h.
 *
 *   bound   bytes; moe_choose: latency.  A warp keeps its token's logits and keys in shared memory
 *           and looks through them once for each of its choices.
 */
#include "backend/cuda/moe.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"

__device__ __forceinline__ float read(const struct moe_floats &a, size_t i)
{
    return a.bf16 ? bf16_f32(((const uint16_t *)a.at)[i]) : ((const float *)a.at)[i];
}

__device__ __forceinline__ float sigmoid(float x)
{
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_cpu<false>(-x)));
}

/* Order of floats as that of integers: NaN 1, then from minus infinity up; the zeros are equal. */
__device__ __forceinline__ uint32_t order(float x)
{
    uint32_t u = __float_as_uint(__fadd_rn(x, 0.0f));
    if (x != x) return 1;
    return u >> 31 ? ~u : u | 0x80000000u;
}

/* route.c's max_of: that of the first element, unless a later one is above. */
__device__ __forceinline__ float max_of(const float *x, int n)
{
    float max = MINUS_INF;
    for (int i = threadIdx.x & 31; i < n; i += 32)
        max = fmaxf(max, x[i]);
    for (int w = 1; w < 32; w *= 2)
        max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, w));
    return isnan(x[0]) ? x[0] : max;
}

/* to[i] = exp(x[i] - max); returns their sum by lanes. */
__device__ __forceinline__ float exp_all(float *to, const float *x, int n)
{
    float max = max_of(x, n), acc = 0.0f;
    __syncwarp(); /* `to` may be x */
    for (int i = threadIdx.x & 31; i < n; i += 32)
        to[i] = exp_cpu<false>(__fsub_rn(x[i], max));
    __syncwarp();
    for (int i = threadIdx.x & 15; i < n; i += 16)
        acc = __fadd_rn(acc, to[i]);
    return lanes_sum(acc);
}

/* The largest of key[0 .. n) whose bit in `taken` (of this lane's own) is not set; ties to the lower
 * index.  All lanes get it. */
__device__ __forceinline__ int next_best(const float *key, int n, uint32_t *taken)
{
    int lane = threadIdx.x & 31;
    uint32_t best = 0, at = 0xffffffffu;
    for (int i = lane; i < n; i += 32) {
        uint32_t o = *taken >> (i / 32) & 1 ? 0 : order(key[i]);
        if (o > best) best = o, at = i;
    }
    uint32_t top = __reduce_max_sync(FULL_WARP, best);
    at = __reduce_min_sync(FULL_WARP, best == top ? at : 0xffffffffu);
    if ((at & 31) == lane) *taken |= 1u << (at / 32);
    return (int)at;
}

/* The sum of the two largest of a group, by one thread. */
__device__ __forceinline__ float group_score(const float *key, int n)
{
    int a = 0, b = -1;
    for (int i = 1; i < n; i++) {
        if (order(key[i]) > order(key[a]))
            b = a, a = i;
        else if (b < 0 || order(key[i]) > order(key[b]))
            b = i;
    }
    return b < 0 ? key[a] : __fadd_rn(key[a], key[b]);
}

/* Experts outside the best groups drop to -inf. */
__device__ __forceinline__ void keep_groups(const struct moe_choose_args &a, float *key)
{
    __shared__ float scores[MOE_CHOOSE_WARPS][MOE_CHOOSE_EXPERTS];
    float *score = scores[threadIdx.x / 32];
    int lane = threadIdx.x & 31, size = a.n_experts / a.n_group, kept[4];
    uint32_t taken = 0;
    for (int g = lane; g < a.n_group; g += 32)
        score[g] = group_score(key + g * size, size);
    __syncwarp();
    for (int j = 0; j < 4; j++)
        kept[j] = j < a.topk_group ? next_best(score, a.n_group, &taken) : -1;
    for (int i = lane; i < a.n_experts; i += 32) {
        int g = i / size;
        if (g != kept[0] && g != kept[1] && g != kept[2] && g != kept[3]) key[i] = MINUS_INF;
    }
    __syncwarp();
}

/* The id of this lane's choice. */
__device__ __forceinline__ int choose(const struct moe_choose_args &a, const float *x, float *key)
{
    int lane = threadIdx.x & 31, id = -1;
    uint32_t taken = 0;
    const float *by = key;
    if (a.key == MOE_KEY_LOGIT) by = x;
    if (a.key == MOE_KEY_SOFTMAX) (void)exp_all(key, x, a.n_experts);
    if (a.key == MOE_KEY_SIGMOID)
        for (int i = lane; i < a.n_experts; i += 32) {
            key[i] = sigmoid(x[i]);
            if (a.bias.at) key[i] = __fadd_rn(key[i], read(a.bias, i));
        }
    __syncwarp();
    if (a.n_group > 1) keep_groups(a, key);
    for (int j = 0; j < a.top_k; j++) {
        int best = next_best(by, a.n_experts, &taken);
        if (lane == j) id = best;
    }
    return id;
}

/* The weight of this lane's id before it is normalised; an id that is none: 0. */
__device__ __forceinline__ float weigh(const struct moe_choose_args &a, const float *x,
                                       float *scratch, int id)
{
    int lane = threadIdx.x & 31;
    bool known = id >= 0;
    float mine = known ? x[id] : 0.0f;
    if (a.weigh == MOE_WEIGH_RAW) return mine;
    if (a.weigh == MOE_WEIGH_SIGMOID) return known ? sigmoid(mine) : 0.0f;
    __syncwarp();
    if (a.weigh == MOE_WEIGH_SOFTMAX) {
        float sum = exp_all(scratch, x, a.n_experts);
        return known ? __fdiv_rn(scratch[id], sum) : 0.0f;
    }
    uint32_t all = __ballot_sync(FULL_WARP, known);
    int n = __popc(all), at = __popc(all & ((1u << lane) - 1));
    if (n == 0) return 0.0f;
    if (known) scratch[at] = mine;
    __syncwarp();
    float sum = exp_all(scratch, scratch, n);
    return known ? __fdiv_rn(scratch[at], sum) : 0.0f;
}

__device__ __forceinline__ void put(const struct moe_choices &to, size_t at, int id, float weight,
                                    int n_experts)
{
    uint32_t w = f32_bf16(weight), p = (uint32_t)id << 16 | w;
    bool known = id >= 0 && id < n_experts;
    if (to.packed) to.packed[at] = known ? p : 0xffff0000u | w;
    if (to.packed_out) to.packed_out[at] = (int32_t)p;
    if (to.ids_out) to.ids_out[at] = (int16_t)id;
}

extern "C" __global__ void __launch_bounds__(MOE_CHOOSE_WARPS * 32)
    moe_choose(const __grid_constant__ struct moe_choose_args a)
{
    __shared__ float logits[MOE_CHOOSE_WARPS][MOE_CHOOSE_EXPERTS],
        keys[MOE_CHOOSE_WARPS][MOE_CHOOSE_EXPERTS];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    size_t token = blockIdx.x * MOE_CHOOSE_WARPS + warp;
    if (token >= a.n_tokens) return;
    float *x = logits[warp], *key = keys[warp];
    for (int i = lane; i < a.n_experts; i += 32)
        x[i] = read(a.logits, token * a.n_experts + i);
    __syncwarp();
    int id = -1;
    if (!a.replay)
        id = choose(a, x, key);
    else if (lane < a.top_k)
        id = a.replay[token * a.top_k + lane];
    bool known = lane < a.top_k && id >= 0 && id < a.n_experts;
    float w = weigh(a, x, key, known ? id : -1), sum = 0.0f;
    for (int j = 0; j < a.top_k; j++)
        sum = __fadd_rn(sum, __shfl_sync(FULL_WARP, w, j));
    if (a.scales)
        sum = __fadd_rn(sum, 1e-20f);
    else if (sum < 1e-20f)
        sum = 1e-20f;
    if (a.scales) w = __fmul_rn(w, a.scaling);
    if (a.divide) w = __fdiv_rn(w, sum);
    if (lane < a.top_k) put(a.to, token * a.top_k + lane, id, w, a.n_experts);
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS)
    moe_take(const __grid_constant__ struct moe_take_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int i = blockIdx.x * MOE_THREADS + threadIdx.x;
    if (i >= a.n) return;
    if (a.packed)
        put(a.to, i, a.packed[i] >> 16, bf16_lo((uint32_t)a.packed[i]), a.n_experts);
    else
        put(a.to, i, a.ids[i], read(a.weights, i), a.n_experts);
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS)
    moe_rows(const __grid_constant__ struct moe_rows_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    size_t row = blockIdx.x;
    float w = a.packed ? bf16_lo(a.packed[row]) : 1.0f;
    for (int i = threadIdx.x; i < a.n; i += MOE_THREADS) {
        float x = bf16_f32(f32_bf16(read(a.x, row * a.n + i)));
        a.out[row * a.n + i] = f32_bf16(a.packed ? __fmul_rn(w, x) : x);
    }
}

/* The expert of a row; n_experts: the row is none's. */
__device__ __forceinline__ int expert_of(const int32_t *first, int n_experts, int row)
{
    int lo = 0, hi = n_experts; /* first[lo] <= row < first[hi], if any */
    if (row >= first[n_experts]) return n_experts;
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if (first[mid] <= row)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS)
    moe_activate(const __grid_constant__ struct moe_activate_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int e = expert_of(a.first, a.n_experts, blockIdx.x);
    if (e == a.n_experts) return;
    size_t row = (size_t)blockIdx.x * a.n, bias = (size_t)e * a.n;
    float alpha = a.alpha ? a.alpha[e] : a.alpha_all, beta = a.beta ? a.beta[e] : a.beta_all,
          limit = a.limit ? a.limit[e] : a.limit_all;
    for (int i = threadIdx.x; i < a.n; i += MOE_THREADS) {
        float g = a.gate[row + i], u = a.up[row + i];
        if (a.gate_bias) g = __fadd_rn(g, a.gate_bias[bias + i]);
        if (a.up_bias) u = __fadd_rn(u, a.up_bias[bias + i]);
        if (g > limit) g = limit; /* NaN passes */
        if (u > limit) u = limit;
        if (u < -limit) u = -limit;
        float d = __fadd_rn(1.0f, exp_cpu<false>(-__fmul_rn(alpha, g)));
        a.out[row + i] = f32_bf16(__fmul_rn(__fdiv_rn(g, d), __fadd_rn(u, beta)));
    }
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS)
    moe_finish(const __grid_constant__ struct moe_finish_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int e = expert_of(a.first, a.n_experts, blockIdx.x);
    if (e == a.n_experts) return;
    size_t row = (size_t)blockIdx.x * a.n, bias = (size_t)e * a.n;
    for (int i = threadIdx.x; i < a.n; i += MOE_THREADS)
        a.out[row + i] = f32_bf16(__fadd_rn(a.x[row + i], a.bias[bias + i]));
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS)
    moe_combine(const __grid_constant__ struct moe_combine_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    size_t token = blockIdx.x;
    const int32_t *row_of = a.row_of + token * a.top_k;
    const uint32_t *packed = a.packed + token * a.top_k;
    for (int i = threadIdx.x * 2; i < a.n; i += MOE_THREADS * 2) { /* n is even */
        float y[2] = {0.0f, 0.0f};
        bool any = false;
        for (int j = 0; j < a.top_k; j++) {
            if (row_of[j] < 0) continue;
            float w = a.unweighed ? 1.0f : bf16_lo(packed[j]);
            uint32_t r = *(const uint32_t *)(a.rows + (size_t)row_of[j] * a.n + i);
            y[0] = any ? __fmaf_rn(w, bf16_lo(r), y[0]) : __fmul_rn(w, bf16_lo(r));
            y[1] = any ? __fmaf_rn(w, bf16_hi(r), y[1]) : __fmul_rn(w, bf16_hi(r));
            any = true;
        }
        for (int k = 0; k < 2; k++) {
            float v = __fadd_rn(y[k], 0.0f); /* to a sum that was zero */
            if (a.bf16)
                ((uint16_t *)a.out)[token * a.n + i + k] = f32_bf16(v);
            else
                ((float *)a.out)[token * a.n + i + k] = v;
        }
    }
}
