#include "backend/cpu/cpu.h"
#include <string.h>

#if defined(__x86_64__) && !defined(MOULT_REFERENCE_F32)
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif
#if defined(__aarch64__) && !defined(MOULT_REFERENCE_F32)
#define HAVE_NEON 1
#else
#define HAVE_NEON 0
#endif

const struct backend_ops *cpu_ops_find(const char *name)
{
    if (strcmp(name, "portable") == 0) return &cpu_ops_portable;
#if HAVE_X86
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &cpu_ops_avx2
                                                                               : NULL;
    /* The unit is compiled for all of these, so that the compiler may use any. */
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bf16") &&
                       __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma")
                   ? &cpu_ops_avx512
                   : NULL;
#endif
#if HAVE_NEON
    if (strcmp(name, "neon") == 0) return &cpu_ops_neon; /* part of the base architecture */
#endif
    return NULL;
}

const struct backend_ops *cpu_ops_best(void)
{
    const struct backend_ops *ops = cpu_ops_find("avx512");
    if (ops == NULL) ops = cpu_ops_find("avx2");
    if (ops == NULL) ops = cpu_ops_find("neon");
    return ops ? ops : &cpu_ops_portable;
}

err_t cpu_ops_get(const struct backend_ops **out, const char *name, struct err *e)
{
    const struct backend_ops *ops = name ? cpu_ops_find(name) : cpu_ops_best();
    if (ops == NULL)
        return err_set(e, ERR_UNSUPPORTED,
                       "isa: '%s' is not available on this machine; allowed: portable%s%s%s", name,
                       cpu_ops_find("avx2") ? ", avx2" : "",
                       cpu_ops_find("avx512") ? ", avx512" : "",
                       cpu_ops_find("neon") ? ", neon" : "");
    *out = ops;
    return OK;
}

/* A task is TASK_PANELS panels of at most TASK_ROWS rows. */
enum { TASK_PANELS = 4, TASK_ROWS = GEMM_ROWS };

struct gemm_loop {
    const struct backend_ops *ops;
    const struct gemm *g;
    size_t m, n_panels, n_blocks;
};

static void gemm_task(void *arg, int i)
{
    const struct gemm_loop *l = arg;
    size_t p0 = (size_t)i % l->n_blocks * TASK_PANELS, m0 = (size_t)i / l->n_blocks * TASK_ROWS;
    size_t np = l->n_panels - p0 < TASK_PANELS ? l->n_panels - p0 : TASK_PANELS;
    size_t m = l->m - m0 < TASK_ROWS ? l->m - m0 : TASK_ROWS;
    struct gemm g = gemm_from_row(*l->g, m0);
    l->ops->gemm(&g, m, p0, np);
}

void cpu_gemm(const struct backend_ops *ops, struct pool *pool, const struct gemm *g, size_t m)
{
    struct gemm_loop l = {
        .ops = ops, .g = g, .m = m, .n_panels = ((size_t)g->w->rows + PANEL_ROWS - 1) / PANEL_ROWS};
    l.n_blocks = (l.n_panels + TASK_PANELS - 1) / TASK_PANELS;
    pool_run(pool, gemm_task, &l, (int)(l.n_blocks * ((m + TASK_ROWS - 1) / TASK_ROWS)));
}
