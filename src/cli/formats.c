#include "cli/formats.h"
#include "cli/inspect_model.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct line {
    size_t n;
    uint64_t bytes;
    bool layers[CONFIG_MAX_LAYERS], any_layer;
};

static int layer_of(const char *name)
{
    const char *at = strstr(name, "layers.");
    long n = at ? strtol(at + strlen("layers."), NULL, 10) : -1;
    return n < CONFIG_MAX_LAYERS ? (int)n : -1;
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
    for (int i = 0; i < CONFIG_MAX_LAYERS; i++) {
        int from = i;
        if (!l->layers[i]) continue;
        while (i + 1 < CONFIG_MAX_LAYERS && l->layers[i + 1])
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
    for (int c = 0; c < MODULE_CLASSES; c++)
        for (int f = 0; f < FORMAT_COUNT; f++) {
            struct line l = {0};
            for (size_t i = 0; i < n; i++) {
                if (specs[i].shape.kind == RESIDENT_F32 || specs[i].shape.format != (format_t)f ||
                    module_class(specs[i].name) != (module_class_t)c)
                    continue;
                int layer = layer_of(specs[i].name);
                l.n++;
                l.bytes += bytes_of(&specs[i]);
                if (layer >= 0) l.layers[layer] = l.any_layer = true;
            }
            if (l.n) put_line(out, module_class_names[c], (format_t)f, &l);
        }
}
