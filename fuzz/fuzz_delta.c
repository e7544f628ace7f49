/* Any bytes as the index of a delta (first byte even), or as the frame of a tensor's change (odd): the bits of the
 * first byte choose encoding and checksum, the next two the tensor's length. */
#include "weight/delta.h"
#include <jansson.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void index_of(const uint8_t *data, size_t n)
{
    struct delta_index x = {0};
    struct err e = {0};
    bool is = false;
    err_t kind = delta_is(&is, (const char *)data, n, "index", &e);
    err_t rc = delta_parse(&x, (const char *)data, n, "index", &e);
    if (rc != OK) {
        CHECK(e.msg[0] && x.entries == NULL && x.root == NULL);
        return;
    }
    CHECK(kind == OK && is && x.version >= 0 && x.version <= DELTA_VERSION_MAX);
    for (size_t i = 0; i < x.n; i++) {
        CHECK(delta_plain_name(x.entries[i].file));
        CHECK(i == 0 || strcmp(x.entries[i - 1].file, x.entries[i].file) <= 0);
    }
    delta_free(&x);
}

static int memory_file(const void *p, size_t n)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(fd >= 0 && (n == 0 || pwrite(fd, p, n, 0) == (ssize_t)n));
    return fd;
}

/* The target lies between two guards, which stay. */
static void frame_of(unsigned bits, size_t bytes, const uint8_t *frame, size_t n)
{
    static uint8_t image[65536 + 32], after[sizeof image];
    memset(image, 0xa5, sizeof image);
    int to = memory_file(image, bytes + 32);
    struct stat st;
    struct st_tensor tensor = {.name = "t", .dtype = ST_U8, .n_dims = 1, .shape = {n}, .bytes = n};
    struct st_file file = {.path = (char *)"frame", .fd = memory_file(frame, n), .file_bytes = n};
    CHECK(fstat(file.fd, &st) == 0);
    file.mtime = st.st_mtim;
    struct delta_change c = {.from = &file,
                             .frame = &tensor,
                             .to = to,
                             .offset = 16,
                             .bytes = bytes,
                             .to_path = "target",
                             .checksum = "00000001"};
    struct err e = {0};
    err_t rc = delta_apply(&c, bits & 2 ? DELTA_OVERWRITE : DELTA_XOR,
                           bits & 4 ? DIGEST_ADLER32 : DIGEST_XXH3_128, &e);
    CHECK(rc == OK ? bytes == 0 : e.msg[0]);
    CHECK(fstat(to, &st) == 0 && (size_t)st.st_size == bytes + 32);
    CHECK(pread(to, after, bytes + 32, 0) == (ssize_t)(bytes + 32));
    CHECK(memcmp(after, image, 16) == 0 && memcmp(after + 16 + bytes, image, 16) == 0);
    close(file.fd);
    close(to);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 3) return 0;
    if (data[0] & 1)
        frame_of(data[0], (size_t)data[1] << 8 | data[2], data + 3, n - 3);
    else
        index_of(data + 1, n - 1);
    return 0;
}
