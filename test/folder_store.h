/*
 * folder_store.h - a store that holds the weights of a model folder, as serve would load it.
 *
 * In the host's memory, or, with MOULT_TEST_DEVICE=cuda, a GPU's (device.h); folder_store_free frees
 * that too.
 */
#ifndef TEST_FOLDER_STORE_H
#define TEST_FOLDER_STORE_H

#include "base/mem.h"
#include "device.h"
#include "model/model.h"
#include "weight/plan.h"
#include "weight/update.h"

static inline err_t update_from(struct store *s, const char *dir, int threads, struct err *e)
{
    struct update *u = NULL;
    struct update_progress p = {0};
    err_t rc = update_begin(&u, s, e);
    if (rc != OK) return rc;
    rc = update_stage_dir(u, dir, threads, &p, e);
    if (rc == OK) CHECK(p.bytes_done == p.bytes_total);
    if (rc == OK) rc = update_prepare(u, e);
    if (rc == OK) update_commit(u);
    update_free(u);
    return rc;
}

/* `encode`: as with --quantization, or FORMAT_COUNT. */
static inline err_t folder_store_in(struct store **out, struct config *c, const char *dir,
                                    format_t encode, struct memory memory, struct err *e)
{
    struct slot_spec *specs = NULL;
    struct plan p = {0};
    struct store *s = NULL;
    size_t n = 0;
    err_t rc = config_load(c, dir, e);
    if (rc == OK) rc = model_specs(c, &specs, &n, e);
    if (rc == OK) rc = plan_open(&p, dir, specs, n, e);
    if (rc == OK) rc = plan_formats(&p, specs, e);
    if (rc == OK && encode != FORMAT_COUNT) rc = plan_encode(&p, specs, encode, 1u << encode, e);
    plan_close(&p);
    if (rc == OK) rc = store_new(&s, specs, n, memory, e);
    mem_free(specs);
    if (rc == OK) rc = update_from(s, dir, 2, e);
    if (rc == OK)
        *out = s;
    else
        store_free(s);
    return rc;
}

enum { FOLDER_STORES = 16 };
static struct folder_device {
    struct store *s;
    struct test_device t;
} folder_devices[FOLDER_STORES];

static inline err_t folder_store(struct store **out, struct config *c, const char *dir,
                                 format_t encode, struct err *e)
{
    struct folder_device *at = folder_devices;
    if (!test_on_gpu()) return folder_store_in(out, c, dir, encode, memory_host, e);
    while (at->s)
        at++;
    CHECK(at < folder_devices + FOLDER_STORES);
    test_device_open(&at->t);
    err_t rc = folder_store_in(&at->s, c, dir, encode, at->t.memory, e);
    if (rc != OK) {
        test_device_close(&at->t);
        return rc;
    }
    test_device_stage(&at->t, at->s);
    *out = at->s;
    return OK;
}

static inline void folder_store_free(struct store *s)
{
    store_free(s);
    for (int i = 0; s && i < FOLDER_STORES; i++)
        if (folder_devices[i].s == s) {
            test_device_close(&folder_devices[i].t);
            folder_devices[i].s = NULL;
        }
}

#endif
