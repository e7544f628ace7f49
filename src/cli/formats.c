#include "cli/formats.h"
#include "backend/layout.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LAYERS 1024

/* By what a name holds; the first that fits. */
static const struct {
    const char *part, *name;
} classes[] = {
    {".mlp.experts.", "experts"}, {"_norm", "norms"},        {"norm.", "norms"},
    {".mlp.gate.", "router"},     {".self_attn.", "attention"}, {".mlp.", "dense MLP"},
    {"embed_tokens.", "embedding"}, {"lm_head.", "head"},
};
#define N_CLASSES (sizeof classes / sizeof classes[0])

struct line {
    size_t n;
    uint64_t bytes;
    bool layers[MAX_LAYERS], any_layer;
};

static size_t class_of(const struct slot_spec *s)
{
    for (size_t i = 0; i < N_CLASSES; i++) {
        if (strstr(s->name, classes[i].part) == NULL) continue;
        size_t first = 0;
        while (strcmp(classes[first].name, classes[i].name) != 0)
            first++;
        return first;
    }
    return N_CLASSES;
}

static int layer_of(const char *name)
{
    const char *at = strstr(name, "layers.");
    long n = at ? strtol(at + strlen("layers."), NULL, 10) : -1;
    return n < MAX_LAYERS ? (int)n : -1;
}

/* Canonical bytes of a slot. */
static uint64_t bytes_of(const struct slot_spec *s)
{
    size_t data = 0, scale = 0;
    (void)format_bytes(s->shape.format, s->shape.rows, s->shape.cols, &data, &scale);
    return (uint64_t)data + scale;
}

static void put_layers(struct buf *out, const struct line *l)
{
    const char *sep = " (layers ";
    for (int i = 0; i < MAX_LAYERS; i++) {
        int from = i;
        if (!l->layers[i]) continue;
        while (i + 1 < MAX_LAYERS && l->layers[i + 1])
            i++;
        buf_printf(out, from == i ? "%s%d" : "%s%d-%d", sep, from, i);
        sep = ", ";
    }
    if (l->any_layer) buf_puts(out, ")");
}

static void put_line(struct buf *out, const char *name, format_t f, const struct line *l)
{
    buf_printf(out, "\n%s: %zu %s, %.2f MB", name, l->n, formats[f].name, (double)l->bytes * 1e-6);
    put_layers(out, l);
}

void formats_report(struct buf *out, const struct slot_spec *specs, size_t n,
                    const struct quant_config *config)
{
    buf_printf(out, "quantization config: %s", quant_config_about(config));
    for (size_t c = 0; c < N_CLASSES; c++)
        for (int f = 0; f < FORMAT_COUNT; f++) {
            struct line l = {0};
            for (size_t i = 0; i < n; i++) {
                if (specs[i].shape.kind == RESIDENT_F32 || class_of(&specs[i]) != c ||
                    specs[i].shape.format != (format_t)f)
                    continue;
                int layer = layer_of(specs[i].name);
                l.n++;
                l.bytes += bytes_of(&specs[i]);
                if (layer >= 0) l.layers[layer] = l.any_layer = true;
            }
            if (l.n) put_line(out, classes[c].name, (format_t)f, &l);
        }
}
