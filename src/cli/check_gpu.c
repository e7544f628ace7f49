/* check_gpu.c - `moult check-gpu`: what GPU there is, whether it computes what the kernels count
 * on, how fast it copies. */
#include "backend/cuda/device.h"
#include "backend/cuda/selftest.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/commands.h"
#include <ctype.h>
#include <stdio.h>
#include <string.h>

const struct opt_command check_gpu_command = {
    .name = "check-gpu",
    .about = "usage: moult check-gpu\n\n"
             "Says what GPU there is, computes a sample of every format's matrix products and of "
             "the combine of experts\n"
             "on it, compares each word with an exact model on the CPU, and measures copies.  "
             "Takes seconds.\n"
             "Exit status: 0, or 1 if a word differs or there is no GPU that can be used.\n",
};

/* The driver's own version, "580.159.04", out of a file of the system; "": it is not there. */
static void driver_version(char out[32])
{
    struct buf b = {0};
    out[0] = 0;
    if (file_read(&b, "/proc/driver/nvidia/version", 4096, NULL) != OK) return;
    const char *at = b.data ? strstr(b.data, "Kernel Module") : NULL;
    while (at && *at && *at != '\n' && !(isdigit((unsigned char)*at) && at[-1] == ' '))
        at++;
    size_t n = at && isdigit((unsigned char)*at) ? strspn(at, "0123456789.") : 0;
    if (n < 32) {
        memcpy(out, at ? at : "", n);
        out[n] = 0;
    }
    buf_release(&b);
}

static void tell_device(struct device *d)
{
    const struct device_info *i = device_about(d);
    char version[32];
    size_t left = 0;
    driver_version(version);
    (void)!device_free_bytes(&left, d, NULL);
    printf("GPU      %s, compute capability %d.%d, %d multiprocessors\n", i->name, i->major,
           i->minor, i->n_sms);
    printf("driver   %s%sCUDA %d.%d\n", version, *version ? ", " : "", i->driver / 1000,
           i->driver % 1000 / 10);
    printf("memory   %.1f GB, %.1f free\n", (double)i->total_bytes * 1e-9, (double)left * 1e-9);
}

static int tell(const struct selftest *t)
{
    int bad = 0;
    printf("copies   inside %.0f GB/s (read and written), from pinned host memory %.1f, to it "
           "%.1f\n\n",
           t->inside * 1e-9, t->to * 1e-9, t->from * 1e-9);
    printf("%-22s %10s %10s\n", "bit for bit", "words", "differ");
    for (int i = 0; i < t->n; i++) {
        const struct selftest_row *r = &t->rows[i];
        printf("%-22s %10llu %10llu\n", r->what, (unsigned long long)r->words,
               (unsigned long long)r->differ);
        bad += r->differ > 0;
    }
    fflush(stdout);
    for (int i = 0; i < t->n; i++)
        if (t->rows[i].differ)
            fprintf(stderr, "moult check-gpu: %s, %s\n", t->rows[i].what, t->rows[i].first);
    return bad;
}

int cmd_check_gpu(int argc, char **argv)
{
    struct buf help = {0};
    struct err e = {0};
    struct device *d = NULL;
    struct selftest *t = NULL;
    int bad = 1;
    options_t o = options_parse(&check_gpu_command, argc, argv, NULL, NULL, &e);
    if (o == OPTIONS_HELP) {
        options_help(&check_gpu_command, &help);
        fputs(help.data ? help.data : "", stdout);
        buf_release(&help);
        return 0;
    }
    if (o == OPTIONS_ERROR) {
        fprintf(stderr, "moult check-gpu: %s\n", e.msg);
        return 2;
    }
    err_t rc = device_open(&d, 0, 0, &e);
    if (rc == OK) {
        double t0 = clock_s();
        tell_device(d);
        rc = selftest_run(&t, d, false, &e);
        if (rc == OK) bad = tell(t);
        if (rc == OK && !bad) printf("\nall words agree; checked in %.1f s\n", clock_s() - t0);
    }
    if (rc != OK) fprintf(stderr, "moult check-gpu: %s\n", e.msg);
    mem_free(t);
    device_close(d);
    return rc == OK && !bad ? 0 : 1;
}
