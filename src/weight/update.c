#include "weight/update.h"

#include "base/mem.h"
#include "weight/update_internal.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_ABSENT 16 /* values of an optional slot */

static void release(struct update *u)
{
    if (u->kept) plan_close(&u->kept->plan);
    mem_free(u->kept);
    if (!u->in_place) store_arena_free(u->store, u->next);
    store_arena_free(u->store, u->former);
    mem_free(u->staged);
    mem_free(u->sums);
    mem_free(u->inputs);
    mem_free(u->amax);
    mem_free(u);
}

static bool make_room(struct update *u)
{
    size_t n = store_slots(u->store);
    u->staged = mem_try_array(n, sizeof u->staged[0]);
    u->sums = mem_try_array(n, sizeof u->sums[0]);
    if (u->staged == NULL || u->sums == NULL) return false;
    if (!u->in_place) return (u->next = store_arena_new(u->store)) != NULL;
    u->inputs = mem_try_array(n, sizeof u->inputs[0]);
    u->amax = mem_try_array(n, sizeof u->amax[0]);
    u->kept = mem_try(sizeof *u->kept);
    return u->inputs && u->amax && u->kept;
}

void update_turn(const struct update_progress *p, bool more)
{
    if (p && p->turn) p->turn(p->turn_ctx, more);
}

static err_t begin(struct update **out, struct store *s, bool in_place, struct err *e)
{
    if (!store_claim(s)) return err_set(e, ERR_STATE, "another weight update is in progress");
    struct update *u = mem_try(sizeof *u);
    if (u) {
        u->store = s;
        u->in_place = in_place;
    }
    if (u == NULL || !make_room(u)) {
        if (u) release(u);
        store_unclaim(s);
        return in_place
                   ? err_set(e, ERR_NOMEM, "no memory to plan a weight update")
                   : err_set(e, ERR_NOMEM, "no memory for a%s generation of weights (%zu bytes)",
                             store_epoch(s) ? " second" : "", store_bytes(s));
    }
    u->bad_slot = SIZE_MAX;
    pthread_mutex_init(&u->lock, NULL);
    *out = u;
    return OK;
}

err_t update_begin(struct update **out, struct store *s, struct err *e)
{
    return begin(out, s, false, e);
}

err_t update_begin_in_place(struct update **out, struct store *s, struct err *e)
{
    CHECK(store_epoch(s) > 0);
    return begin(out, s, true, e);
}

void update_note(struct update *u, size_t slot, part_t part, size_t at, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&u->lock);
    bool lower = slot != u->bad_slot   ? slot < u->bad_slot
                 : part != u->bad_part ? part < u->bad_part
                                       : at < u->bad_at;
    if (lower) {
        u->bad_slot = slot;
        u->bad_part = part;
        u->bad_at = at;
        vsnprintf(u->bad_note, sizeof u->bad_note, fmt, args);
    }
    pthread_mutex_unlock(&u->lock);
    va_end(args);
}

void update_put(struct update *u, size_t slot, part_t part, size_t row0, size_t n,
                const void *canon)
{
    for (; slot != SIZE_MAX; slot = store_find_next(u->store, slot)) {
        if (u->inputs && part == PART_INPUT) memcpy(&u->inputs[slot], canon, sizeof(float));
        if (u->next) store_put(u->store, u->next, slot, part, row0, n, canon);
    }
}

void update_mark(struct update *u, size_t slot)
{
    for (; slot != SIZE_MAX; slot = store_find_next(u->store, slot))
        u->staged[slot] = true;
}

void update_keep_rest(struct update *u)
{
    size_t n = store_slots(u->store);
    u->partial = !store_lost(u->store);
    if (!u->partial || u->in_place) return;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && u->staged[end] == u->staged[i]; end++)
            ;
        if (!u->staged[i]) store_keep(u->store, u->next, i, end - i);
    }
}

err_t update_check_open(const struct update *u, struct err *e)
{
    if (u->state == OPEN && !u->broken) return OK;
    return err_set(e, ERR_STATE,
                   u->broken ? "this weight update has failed"
                             : "this weight update takes no more tensors");
}

static err_t check_shape(const struct slot_spec *p, uint64_t rows, uint64_t cols, struct err *e)
{
    if (rows == p->shape.rows && cols == p->shape.cols) return OK;
    return err_set(e, ERR_INPUT, "tensor %s: shape [%llu, %llu], the model needs [%llu, %llu]",
                   p->name, (unsigned long long)rows, (unsigned long long)cols,
                   (unsigned long long)p->shape.rows, (unsigned long long)p->shape.cols);
}

/* One number after another: BF16 as f32. */
static err_t stage_floats(struct update *u, size_t slot, const uint16_t *bf16, struct err *e)
{
    const struct slot_spec *p = store_spec(u->store, slot);
    size_t n = (size_t)p->shape.rows * (size_t)p->shape.cols;
    uint32_t *x = mem_try_array(n, sizeof *x);
    if (x == NULL) return err_set(e, ERR_NOMEM, "tensor %s: no memory", p->name);
    for (size_t i = 0; i < n; i++)
        x[i] = (uint32_t)bf16[i] << 16;
    update_put(u, slot, PART_DATA, 0, (size_t)p->shape.rows, x);
    mem_free(x);
    return OK;
}

static err_t stage_alone(struct update *u, size_t slot, const uint16_t *bf16, struct err *e)
{
    const struct slot_spec *p = store_spec(u->store, slot);
    size_t rows = (size_t)p->shape.rows, cols = (size_t)p->shape.cols;
    size_t group = formats[p->shape.format].group_rows ? formats[p->shape.format].group_rows : 1;
    struct stage_room room = {0};
    struct encode en;
    float amax = 0.0f;
    err_t rc = OK;
    for (size_t r = 0; rc == OK && r < rows; r++)
        rc = stage_amax(&amax, bf16 + r * cols, cols, &room, p->name, e);
    encode_init(&en, p->shape.format, encode_rule_find(p->shape.format, NULL), rows, cols,
                isfinite(amax) ? amax : 0.0f);
    for (size_t r = 0, n; rc == OK && r < rows; r += n) {
        n = rows - r < group ? rows - r : group;
        rc = stage_encoded(u, &en, slot, r, n, bf16 + r * cols, &room, e);
    }
    if (rc == OK) stage_encoded_scalars(u, &en, slot);
    stage_room_free(&room);
    return rc;
}

err_t update_stage(struct update *u, const char *name, const uint16_t *bf16, uint64_t rows,
                   uint64_t cols, struct err *e)
{
    err_t rc = update_check_open(u, e);
    if (rc != OK) return rc;
    size_t slot = store_find(u->store, name);
    if (slot == SIZE_MAX) return err_set(e, ERR_INPUT, "tensor %.200s: unknown to the model", name);
    const struct slot_spec *p = store_spec(u->store, slot);
    rc = check_shape(p, rows, cols, e);
    if (rc != OK) return rc;
    if (u->staged[slot]) return err_set(e, ERR_INPUT, "tensor %s: given twice in one update", name);
    CHECK(!u->in_place);
    struct rows all = {.slot = slot, .n = (size_t)rows, .data = bf16, .tensor = 1.0f};
    if (p->shape.kind == RESIDENT_F32)
        rc = stage_floats(u, slot, bf16, e);
    else if (p->shape.format != FORMAT_BF16)
        rc = stage_alone(u, slot, bf16, e);
    else
        stage_rows(u, &all);
    if (rc == OK) {
        struct stage_room room;
        stage_sum_begin(&room);
        digest_add(&room.sum[PART_DATA], bf16, (size_t)(rows * cols) * sizeof *bf16);
        rc = stage_sum_end(u, slot, &room, e);
    }
    if (rc == OK)
        update_mark(u, slot);
    else
        u->broken = true;
    return rc;
}

void update_fill_absent(struct update *u)
{
    for (size_t i = 0; i < store_slots(u->store); i++) {
        const struct slot_spec *p = store_spec(u->store, i);
        if (u->staged[i] || u->partial || !p->optional) continue;
        CHECK(p->shape.kind == RESIDENT_F32 && p->shape.rows == 1 && p->shape.cols <= MAX_ABSENT);
        float x[MAX_ABSENT];
        for (size_t c = 0; c < p->shape.cols; c++)
            x[c] = p->absent;
        store_put(u->store, u->next, i, PART_DATA, 0, 1, x);
    }
}

err_t update_prepare(struct update *u, struct err *e)
{
    err_t rc = update_check_open(u, e);
    if (rc == OK && store_slots(u->store) && !u->partial)
        rc = plan_missing(store_spec(u->store, 0), store_slots(u->store), u->staged, e);
    if (rc != OK) return rc;
    if (u->bad_slot != SIZE_MAX) return err_set(e, ERR_INPUT, "%s", u->bad_note);
    if (u->next) update_fill_absent(u);
    rc = store_check(u->store, e);
    if (rc == OK) u->state = PREPARED;
    return rc;
}

float update_input_scale(const struct update *u, size_t slot)
{
    CHECK(u->state == PREPARED);
    float input;
    if (u->in_place && u->partial && !u->staged[slot]) {
        store_get(u->store, &input, slot, PART_INPUT, 0, 1);
        return input;
    }
    if (u->in_place) return u->inputs[slot];
    store_get_from(u->store, u->next, &input, slot, PART_INPUT, 0, 1);
    return input;
}

void update_checksum(const struct update *u, char hex[DIGEST_HEX])
{
    struct digest d;
    digest_init(&d, DIGEST_XXH3_128);
    for (size_t i = 0; i < store_slots(u->store); i++) {
        const struct slot_spec *p = store_spec(u->store, i);
        if (!u->staged[i] || store_find(u->store, p->name) != i) continue;
        digest_add(&d, p->name, strlen(p->name) + 1);
        digest_add(&d, u->sums[i], sizeof u->sums[i]);
    }
    digest_hex(&d, hex);
}

void update_commit(struct update *u)
{
    CHECK(u->state == PREPARED && !u->in_place);
    u->former = u->next;
    u->next = NULL;
    store_swap(u->store, &u->former);
    u->state = COMMITTED;
}

bool update_in_place(const struct update *u)
{
    return u->in_place;
}

bool update_touched(const struct update *u)
{
    return u->touched;
}

void update_free(struct update *u)
{
    if (u == NULL) return;
    struct store *s = u->store;
    pthread_mutex_destroy(&u->lock);
    release(u);
    store_unclaim(s);
}
