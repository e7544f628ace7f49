/* format_doc.h - docs/formats.md, written from tables of the source. */
#ifndef TEST_FORMAT_DOC_H
#define TEST_FORMAT_DOC_H

#include "base/buf.h"
#include "cli/quantize_spell.h"
#include "format/act.h"
#include "format/encode.h"

static inline void format_doc_extent(struct buf *b, uint32_t n)
{
    if (n)
        buf_printf(b, "%u", n);
    else
        buf_puts(b, "all");
}

static inline void format_doc_formats(struct buf *b)
{
    static const char *const elems[] = {"BF16", "E4M3", "E2M1"};
    static const char *const scales[] = {"none", "F32", "E8M0", "E4M3"};
    buf_puts(b, "| Name | Element | Scale | One scale for (rows x columns) | Tensor scale | "
                "Bits a weight, 768 x 2048 | K of one sum |\n"
                "| --- | --- | --- | --- | --- | --- | --- |\n");
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const struct format *f = &formats[i];
        size_t data = 0, scale = 0;
        format_bytes((format_t)i, 768, 2048, &data, &scale);
        buf_printf(b, "| `%s` | %s | %s | ", f->name, elems[f->elem], scales[f->scale]);
        if (f->scale == SCALE_NONE) {
            buf_puts(b, "-");
        } else {
            format_doc_extent(b, f->group_rows);
            buf_puts(b, " x ");
            format_doc_extent(b, f->group_cols);
        }
        double bits = 8.0 * (double)(data + scale + (f->tensor ? 4 : 0)) / (768.0 * 2048.0);
        buf_printf(b, " | %s | %.5g | ", f->tensor ? "F32" : "none", bits);
        format_doc_extent(b, f->segment);
        buf_puts(b, " |\n");
    }
}

static inline void format_doc_rules(struct buf *b)
{
    buf_puts(b, "| Rule | Formats (default: bold) | What it is |\n| --- | --- | --- |\n");
    for (size_t i = 0; i < ENCODE_RULES; i++) {
        const struct encode_rule *r = &encode_rules[i];
        buf_printf(b, "| `%s` |", r->name);
        for (int f = 0; f < FORMAT_COUNT; f++) {
            const char *mark = r->standard >> f & 1 ? "**" : "";
            if (r->formats >> f & 1) buf_printf(b, " %s%s%s", mark, formats[f].name, mark);
        }
        buf_printf(b, " | %s |\n", r->about);
    }
}

static inline void format_doc_acts(struct buf *b)
{
    buf_puts(b, "| Name | What it is | F32 scales | Scale of the checkpoint |\n"
                "| --- | --- | --- | --- |\n");
    for (int i = 0; i < ACT_COUNT; i++) {
        buf_printf(b, "| `%s` | %s | ", acts[i].name, acts[i].about);
        if (acts[i].scale_group == 0)
            buf_puts(b, "none");
        else if (acts[i].scale_group == ACT_ROW)
            buf_puts(b, "one a row");
        else
            buf_printf(b, "one each %u of K", acts[i].scale_group);
        buf_printf(b, " | %s |\n", acts[i].static_scale ? "needed" : "not used");
    }
}

static inline void format_doc_spells(struct buf *b)
{
    static const char *const spellings[] = {"hf", "miles", "modelopt", "compressed-tensors"};
    buf_puts(
        b,
        "| Format | Spelling (default: bold) | Elements | Scales | Tensor scale | In the config |\n"
        "| --- | --- | --- | --- | --- | --- |\n");
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
            const struct quantize_spell *s = quantize_spell_find(spellings[i], (format_t)f);
            if (s == NULL || s->config == NULL) continue;
            const char *mark = s->preferred ? "**" : "";
            buf_printf(b, "| `%s` | %s%s%s | `%s` %s | `%s` %s | ", formats[f].name, mark,
                       s->spelling, mark, s->data, st_dtype_name(s->data_dtype), s->scale,
                       st_dtype_name(s->scale_dtype));
            if (s->tensor)
                buf_printf(b, "`%s`%s | %s |\n", s->tensor, s->inverse ? " (1 / scale)" : "",
                           s->algo);
            else
                buf_printf(b, "none | %s |\n", s->algo);
        }
}

static inline void format_doc(struct buf *b)
{
    buf_puts(
        b,
        "# Weight formats\n\n"
        "Written by `make docs` from tables of the source; a test compares it.  The headers there "
        "(`format.h`, `encode.h`,\n`act.h`) define the arithmetic to the last bit.\n\n"
        "A weight is `element * scale * tensor scale`; every scale multiplies on decoding.  "
        "Elements and scales are row-major,\n4-bit elements two a byte with the even one in "
        "the low half, edge groups are partial and nothing is padded.\n\n");
    format_doc_formats(b);
    buf_puts(b, "\n## Encoding rules\n\n`moult quantize --rule NAME`.\n\n");
    format_doc_rules(b);
    buf_puts(
        b,
        "\n## Spellings\n\n`moult quantize --spelling NAME`: parts of a module, by what is added "
        "to its name.  All are read.  An FP8 scale of rule\n`amax-bf16` is stored in BF16.  "
        "Scales of activations are carried over from the source; `miles` writes ones.\n\n");
    format_doc_spells(b);
    buf_puts(b, "\n## Rounding of activations\n\n");
    format_doc_acts(b);
}

#endif
