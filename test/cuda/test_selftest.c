/* test_selftest.c - `moult check-gpu` finds nothing on this GPU, and finds each bit that is turned
 * around. */
#include "backend/cuda/gemm_shape.h"
#include "backend/cuda/selftest.h"
#include "cuda/gpu.h"

static struct gpu gpu;

static void agrees(void **state)
{
    (void)state;
    struct selftest *t = NULL;
    MUST(selftest_run(&t, gpu.d, false, &must_e));
    assert_int_equal(t->n, FORMAT_COUNT + 2);
    for (int i = 0; i < t->n; i++) {
        printf("%-22s %8llu words\n", t->rows[i].what, (unsigned long long)t->rows[i].words);
        if (t->rows[i].differ) fail_msg("%s: %s", t->rows[i].what, t->rows[i].first);
        assert_true(t->rows[i].words > 10000);
    }
    printf("inside %.0f GB/s, to the device %.1f, from it %.1f\n", t->inside * 1e-9, t->to * 1e-9,
           t->from * 1e-9);
    assert_true(t->inside > 1e11 && t->to > 1e9 && t->from > 1e9);
    mem_free(t);
}

static void notices(void **state)
{
    (void)state;
    struct selftest *t = NULL;
    MUST(selftest_run(&t, gpu.d, true, &must_e));
    for (int i = 0; i < t->n; i++) {
        const struct selftest_row *r = &t->rows[i];
        uint64_t results = i < FORMAT_COUNT ? 4 * GEMM_SIZES : i == FORMAT_COUNT ? 1 : FORMAT_COUNT;
        if (r->differ != results)
            fail_msg("%s: %llu words differ, %llu were turned", r->what,
                     (unsigned long long)r->differ, (unsigned long long)results);
        assert_non_null(strstr(r->first, "must be"));
    }
    mem_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(agrees), cmocka_unit_test(notices)};
    if (!gpu_open(&gpu)) return 0;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
