#include "model/forward.h"
#include <math.h>

/* Norm, rotate (half-split), round: one head in place. */
static void rotate(const struct cpu_model *m, float *x, const uint16_t *norm, int32_t pos)
{
    int half = m->c.head_dim / 2;
    const float *cs = m->cos + (size_t)pos * (size_t)half,
                *sn = m->sin + (size_t)pos * (size_t)half;
    m->ops->rmsnorm_f32(x, x, norm, (size_t)m->c.head_dim, m->c.rms_norm_eps);
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = act_round(fmaf(a, cs[i], -(b * sn[i])));
        x[i + half] = act_round(fmaf(b, cs[i], a * sn[i]));
    }
}

/* Decode scales of K and V in a layer. */
static const float *kv_scales(const struct slice *s)
{
    static const float one[2] = {1.0f, 1.0f};
    return s->m->kv_type == KV_BF16 ? one : store_ptr(s->m->store, s->slots.kv_scale);
}

static void prepare_token(void *arg, int i)
{
    const struct slice *s = arg;
    const struct cpu_model *m = s->m;
    const struct config *c = &m->c;
    const struct step *st = s->st;
    int32_t t = s->t0 + i, pos = st->pos[t], row = pos % KV_PAGE, hd = c->head_dim;
    int32_t page = st->seqs[st->seq[t]].pages[pos / KV_PAGE];
    float *q = m->q + (size_t)i * (size_t)(c->n_heads * hd);
    float *k = m->k + (size_t)i * (size_t)(c->n_kv_heads * hd);
    const float *v = m->v + (size_t)i * (size_t)(c->n_kv_heads * hd);
    for (int h = 0; h < c->n_heads; h++)
        rotate(m, q + (size_t)h * (size_t)hd, store_ptr(m->store, s->slots.q_norm), pos);
    const float *scale = kv_scales(s);
    uint8_t *kp = model_kv(m, s->layer, 0, page), *vp = model_kv(m, s->layer, 1, page);
    for (int h = 0; h < c->n_kv_heads; h++) {
        rotate(m, k, store_ptr(m->store, s->slots.k_norm), pos);
        kv_write(m->kv_type, kp, vp, row, hd, k, v, scale[0], scale[1]);
        k += hd;
        v += hd;
        kp += model_kv_head_bytes(m);
        vp += model_kv_head_bytes(m);
    }
}

/* Test only: chunks that start where this step's tokens of the sequence start, as a careless kernel
 * has it. */
static int broken_chunk(const struct step *st, int32_t t)
{
    while (t > 0 && st->seq[t - 1] == st->seq[t])
        t--;
    int32_t first = st->pos[t] % KV_CHUNK / KV_PAGE * KV_PAGE;
    return first ? first : KV_CHUNK;
}

static void attend(void *arg, int i)
{
    const struct slice *s = arg;
    const struct cpu_model *m = s->m;
    const struct config *c = &m->c;
    int32_t n = i / c->n_kv_heads, kvh = i % c->n_kv_heads, t = s->t0 + n;
    int group = c->n_heads / c->n_kv_heads;
    size_t hd = (size_t)c->head_dim, head = model_kv_head_bytes(m);
    const float *kv_scale = kv_scales(s);
    size_t at = ((size_t)n * (size_t)c->n_heads + (size_t)(kvh * group)) * hd;
    struct attn a = {
        .q = m->q + at,
        .out = m->o + at,
        .n_heads = group,
        .head_dim = c->head_dim,
        .kv = m->kv_type,
        .k_scale = kv_scale[0],
        .v_scale = kv_scale[1],
        .k = model_kv(m, s->layer, 0, 0) + (size_t)kvh * head,
        .v = model_kv(m, s->layer, 1, 0) + (size_t)kvh * head,
        .page_stride = (size_t)c->n_kv_heads * head,
        .pages = s->st->seqs[s->st->seq[t]].pages,
        .n_keys = s->st->pos[t] + 1,
        .first_chunk = m->broken ? broken_chunk(s->st, t) : KV_CHUNK,
        .scale = 1.0f / sqrtf((float)c->head_dim),
    };
    m->ops->attention(&a);
}

void forward_attention(struct slice *s)
{
    struct cpu_model *m = s->m;
    const struct config *c = &m->c;
    forward_norm(s, s->slots.in_norm);
    const size_t qkv[] = {s->slots.q, s->slots.k, s->slots.v};
    struct inputs in = forward_inputs(m, m->a, NULL, s->n, (size_t)c->hidden_size, qkv, 3);
    forward_multiply(m, m->q, &in, s->n, s->slots.q);
    forward_multiply(m, m->k, &in, s->n, s->slots.k);
    forward_multiply(m, m->v, &in, s->n, s->slots.v);
    pool_run(m->pool, prepare_token, s, s->n);
    pool_run(m->pool, attend, s, s->n * c->n_kv_heads);
    forward_gemm(m, m->y, m->o, s->n, s->slots.o);
    forward_add(s);
}
