#include "backend/cuda/repack.h"

/* Kernels are named by the width of the elements and the k that share a small scale; formats share them. */
static const struct {
    uint32_t bits, group;
    const char *pack, *unpack;
} kernels[] = {
    {16, 0, "pack_16", "unpack_16"},       {8, 0, "pack_8", "unpack_8"},
    {8, 32, "pack_8_g32", "unpack_8_g32"}, {4, 16, "pack_4_g16", "unpack_4_g16"},
    {4, 32, "pack_4_g32", "unpack_4_g32"},
};

static err_t open_format(struct repack *r, struct device *d, int f, struct err *e)
{
    struct tile_shape t = tile_shape((format_t)f);
    size_t i = 0, n = sizeof kernels / sizeof *kernels, args = sizeof(struct layout_args);
    while (i < n && (kernels[i].bits != t.elem_bits || kernels[i].group != t.group))
        i++;
    CHECK(i < n);
    err_t rc = device_kernel(&r->to_tiles[f], d, kernels[i].pack, args, 0, e);
    return rc != OK ? rc : device_kernel(&r->from_tiles[f], d, kernels[i].unpack, args, 0, e);
}

err_t repack_open(struct repack *r, struct device *d, struct err *e)
{
    struct repack got = {0};
    for (int f = 0; f < FORMAT_COUNT; f++) {
        err_t rc = open_format(&got, d, f, e);
        if (rc != OK) return rc;
    }
    *r = got;
    return OK;
}

/* A block a tile. */
static void launch(struct queue *q, const struct kernel *k, const struct layout_args *a)
{
    CHECK(k->fn && a->rows >= 1 && a->cols >= 1);
    struct launch l = {.grid = {tile_blocks(a->cols), tile_panels(a->rows), 1}};
    l.threads = LAYOUT_THREADS;
    queue_launch(q, k, l, a);
}

void repack_to_tiles(const struct repack *r, struct queue *q, format_t f,
                     const struct layout_args *a)
{
    launch(q, &r->to_tiles[f], a);
}

void repack_from_tiles(const struct repack *r, struct queue *q, format_t f,
                       const struct layout_args *a)
{
    launch(q, &r->from_tiles[f], a);
}
