/*
 * sample.cu - model/sample.c on the device: the same token ids for the same logits.
 *
 *   sample_adjust   a block a row: penalties, bias, barred ids (leaves at once where there are
 *                   none)
 *   sample_row      sample_row.cu: everything that a greedy, scored or unfiltered row needs
 *   sample_finish   sample_finish.cu: filters and top logprobs
 */
#include "backend/cuda/sample.cuh"

enum { ADJUST_THREADS = 256 };

__device__ __forceinline__ void penalise(const struct sample_spec &s, float *x, uint32_t *counts,
                                         int vocab)
{
    for (int i = threadIdx.x; i < s.n_output; i += ADJUST_THREADS) {
        int32_t id = s.output_ids[i];
        if (id >= 0 && id < vocab) atomicAdd(counts + id, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < s.n_output; i += ADJUST_THREADS) {
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
extern "C" __global__ void __launch_bounds__(ADJUST_THREADS)
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
        for (int i = threadIdx.x; i < s.n_bias; i += ADJUST_THREADS)
            if (s.bias_ids[i] >= 0 && s.bias_ids[i] < a.vocab)
                x[s.bias_ids[i]] = __fadd_rn(x[s.bias_ids[i]], s.bias[i]);
        __syncthreads();
        for (int i = threadIdx.x; i < s.n_barred; i += ADJUST_THREADS) {
            if (s.barred[i] < 0 || s.barred[i] >= a.vocab) continue;
            float old = atomicExch(x + s.barred[i], MINUS_INF);
            if (old != MINUS_INF) atomicAdd(&n[isfinite(old) ? 0 : 1], 1);
        }
    }
    __syncthreads();
    if (threadIdx.x < 2) a.lowered[blockIdx.x * 2 + threadIdx.x] = n[threadIdx.x];
}
