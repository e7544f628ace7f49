/* test_oracle.c - the integer model of the tensor core, on sums worked out by hand from its
 * definition, and against float64. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/oracle.h"
#include <math.h>

static struct oracle_bf16 of(float x)
{
    uint16_t h = f32_to_bf16(x);
    assert_true(bf16_to_f32(h) == x);
    return oracle_split(h);
}

/* c + a[0] b[0] + a[1] b[1] */
static float two(float c, float a0, float b0, float a1, float b1)
{
    const struct oracle_bf16 a[] = {of(a0), of(a1)}, b[] = {of(b0), of(b1)};
    return oracle_step(c, a, b, 2);
}

static void single_steps(void **state)
{
    (void)state;
    assert_true(two(0, 0, 0, 0, 0) == 0.0f);
    assert_true(two(1, 3, 5, -2, 7) == 2.0f);
    /* The largest term is 1: what is below 2^-25 is cut, toward zero. */
    assert_true(two(1, 0x1p-26f, 1, 0, 0) == 1.0f);
    assert_true(two(1, -0x1p-26f, 1, 0, 0) == 1.0f);
    assert_true(two(0, 1, 1, -0x1p-26f, 1) == 1.0f);
    /* 1 - 2^-25 is kept, and cut to 24 bits when it becomes f32. */
    assert_true(two(1, -0x1p-25f, 1, 0, 0) == 1.0f - 0x1p-24f);
    /* Terms are cut one by one before they are added: four quarters of the last place are nothing.
     */
    const struct oracle_bf16 a[] = {of(0x1p-27f), of(0x1p-27f), of(0x1p-27f), of(0x1p-27f)};
    const struct oracle_bf16 b[] = {of(1), of(1), of(1), of(1)};
    assert_true(oracle_step(1, a, b, 4) == 1.0f && oracle_step(0, a, b, 4) == 0x1p-25f);
    /* The exponent of a product is the sum of its factors': 1.5 * 1.5 = 2.25 counts as 2^0. */
    assert_true(two(0, 1.5f, 1.5f, 0x1p-25f, 1) == 2.25f);
    assert_true(two(-2.25f, 1.5f, 1.5f, 0x1p-26f, 1) == 0.0f); /* the accumulator's is 2^1 */
    /* Subnormal factors, and a subnormal result. */
    assert_true(two(0, 0x1p-133f, 0x1p100f, 0, 0) == 0x1p-33f);
    assert_true(two(0, 0x1p-70f, 0x1p-70f, 0, 0) == 0x1p-140f);
    assert_true(two(0, 0x1p-75f, 0x1p-75f, 0, 0) == 0.0f);
}

static uint64_t seed = 3;
static float noise(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return bf16_to_f32(f32_to_bf16((float)((double)(int64_t)seed * 0x1p-63)));
}

enum { K = 2048 };

/* A step does not know an order, the chain does; its error is what an H200 was measured to have,
 * toward zero. */
static void chains(void **state)
{
    (void)state;
    struct oracle_bf16 a[K], b[K];
    int moved = 0;
    double error = 0, norm = 0, bias = 0;
    for (int i = 0; i < 200; i++) {
        double want = 0;
        for (int k = 0; k < K; k++) {
            float x = noise(), y = noise();
            a[k] = of(x);
            b[k] = of(y);
            want += (double)x * (double)y;
        }
        float got = oracle_chain(a, b, K);
        for (int k = 0; k < K; k += 16) { /* each step front to back */
            for (int j = 0; j < 8; j++) {
                struct oracle_bf16 s = a[k + j], t = b[k + j];
                a[k + j] = a[k + 15 - j], b[k + j] = b[k + 15 - j];
                a[k + 15 - j] = s, b[k + 15 - j] = t;
            }
        }
        assert_true(oracle_chain(a, b, K) == got);
        for (int k = 0; k < K; k += 32) /* steps in pairs */
            for (int j = 0; j < 16; j++) {
                struct oracle_bf16 s = a[k + j], t = b[k + j];
                a[k + j] = a[k + 16 + j], b[k + j] = b[k + 16 + j];
                a[k + 16 + j] = s, b[k + 16 + j] = t;
            }
        moved += oracle_chain(a, b, K) != got;
        error += ((double)got - want) * ((double)got - want);
        bias += (fabs((double)got) - fabs(want)) / fabs(want);
        norm += want * want;
    }
    print_message("error %.2e, %d of 200 change with the order of steps\n", sqrt(error / norm),
                  moved);
    assert_true(moved > 100);
    assert_true(sqrt(error / norm) > 5e-7 && sqrt(error / norm) < 6e-6 && bias < 0);
}

static void segments(void **state)
{
    (void)state;
    static uint16_t data[2 * K];
    static struct oracle_bf16 w[K], x[K];
    for (int k = 0; k < 2 * K; k++)
        data[k] = f32_to_bf16(noise());
    for (int k = 0; k < K; k++)
        x[k] = of(noise());
    const struct format_parts p = {
        .format = FORMAT_BF16, .rows = 2, .cols = K, .data = data, .tensor = 1.0f};
    oracle_weights(w, &p, 1);
    for (int k = 0; k < K; k++)
        assert_true(w[k].m == oracle_split(data[K + k]).m && w[k].e == oracle_split(data[K + k]).e);
    assert_true(oracle_gemm(&p, 1, w, x, K) == oracle_chain(w, x, K));
    assert_true(oracle_gemm(&p, 1, w, x, 2 * K) == oracle_chain(w, x, K));
    float sum = oracle_chain(w, x, 768) + oracle_chain(w + 768, x + 768, 768);
    sum += oracle_chain(w + 1536, x + 1536, K - 1536);
    assert_true(oracle_gemm(&p, 1, w, x, 768) == sum);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(single_steps), cmocka_unit_test(chains),
                                       cmocka_unit_test(segments)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
