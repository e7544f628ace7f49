/*
 * sample.h - from a row of logits to a token and its logprobs.
 *
 * Order of work, all in f32: penalties and bias, barring of end tokens (below min_new_tokens), then
 *   temperature 0: the highest logit, ties to the lower id; logprobs are log_softmax of the
 * unscaled (penalised, biased) logits; otherwise:     logits / temperature; logprobs are their
 * log_softmax, before filtering; then top-k, top-p, min-p filters and a Gumbel-max draw with noise
 * keyed by (seed, sample index, position): -log(-log(u)) of a counter-based generator. Frequency
 * and presence penalties count output ids, as SGLang; repetition penalty likewise (l > 0 ? l / p :
 * l * p). With want_kept the ids that the filters left come back, in falling order of probability (one
 * where the highest is taken), and the drawn one's logprob is of the distribution over them alone. A scored row (`target` >= 0) takes plain log_softmax of the raw logits. Sums over the
 * vocabulary have one fixed order; results depend on this row alone.
 */
#ifndef MODEL_SAMPLE_H
#define MODEL_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>

#define SAMPLE_MAX_TOP 128

struct sample_params {
    float temperature;                                             /* 0: greedy */
    int32_t top_k;                                                 /* <= 0: all */
    float top_p;                                                   /* (0, 1] */
    float min_p;                                                   /* [0, 1] */
    float frequency_penalty, presence_penalty, repetition_penalty; /* 0, 0, 1: none */
    int32_t n_bias;
    const int32_t *bias_ids;
    const float *bias;
    uint64_t seed;
    uint32_t sample_index; /* of n samples of one request */
};

/* Whether the output so far changes what is drawn next. */
static inline bool sample_has_penalty(const struct sample_params *p)
{
    return p->frequency_penalty != 0.0f || p->presence_penalty != 0.0f ||
           p->repetition_penalty != 1.0f;
}

struct sample_input {
    int32_t target; /* >= 0: score this id; -1: sample */
    int32_t n_top;  /* top logprobs wanted, <= SAMPLE_MAX_TOP */
    int32_t n_of;   /* ids whose logprobs are wanted */
    const int32_t *of;
    /* the rest only when sampling */
    const struct sample_params *params;
    const int32_t *output_ids; /* generated so far */
    int32_t n_output;
    uint64_t position;     /* of the token to be drawn, in the sequence */
    const int32_t *barred; /* ids that may not come now */
    int32_t n_barred;
    bool want_kept; /* only with a filter: top_k, top_p or min_p */
};

struct sample_output {
    int32_t id;
    float logprob; /* finite; impossible tokens have SAMPLE_FLOOR */
    bool finite;   /* false: the logits held NaN or inf; id is then 0 */
    int32_t n_top;
    int32_t top_ids[SAMPLE_MAX_TOP];
    float top_logprobs[SAMPLE_MAX_TOP];
    /* In fresh memory, the caller's to free; NULL: not asked for. */
    float *of; /* [n_of] */
    int32_t *kept;
    int32_t n_kept;
    bool no_memory; /* for one of these */
};

#define SAMPLE_FLOOR (-3.0e38f)

/* `logits` is overwritten.  `scratch` holds vocab floats and vocab int32. */
void sample_row(const struct sample_input *in, struct sample_output *out, float *logits,
                int32_t vocab, float *scratch, int32_t *scratch_ids);

#endif
