#include "base/pages.h"

#include "base/file.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A number of bytes from a file that holds only it ("max" or absent: SIZE_MAX). */
static size_t number_in(const char *path)
{
    struct buf b = {0};
    size_t n = SIZE_MAX;
    if (file_read(&b, path, 4096, NULL) != OK) return n;
    char *end;
    unsigned long long v = strtoull(b.data, &end, 10);
    if (end != b.data) n = v;
    buf_release(&b);
    return n;
}

static size_t field_of(const char *text, const char *field)
{
    const char *at = strstr(text, field);
    return at ? (size_t)strtoull(at + strlen(field), NULL, 10) << 10 : 0;
}

void pages_left(size_t *available, size_t *total)
{
    struct buf b = {0};
    *available = *total = SIZE_MAX;
    if (file_read(&b, "/proc/meminfo", 1 << 16, NULL) == OK) {
        *available = field_of(b.data, "MemAvailable:");
        *total = field_of(b.data, "MemTotal:");
    }
    buf_release(&b);
    size_t limit = number_in("/sys/fs/cgroup/memory.max");
    size_t used = number_in("/sys/fs/cgroup/memory.current");
    if (limit < *total) *total = limit;
    if (limit != SIZE_MAX && used != SIZE_MAX) {
        size_t left = limit > used ? limit - used : 0;
        if (left < *available) *available = left;
    }
}

static void *map(size_t bytes)
{
    if (bytes > PTRDIFF_MAX) return NULL;
    void *p = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                   -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

void *pages_reserve(size_t bytes)
{
    return mem_fault_now() ? NULL : map(bytes);
}

void *pages_try(size_t bytes)
{
    size_t available, total;
    if (mem_fault_now()) return NULL;
    pages_left(&available, &total);
    void *p = bytes <= available ? map(bytes) : NULL;
    if (p) (void)madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

void pages_drop(void *p, size_t bytes)
{
    CHECK(madvise(p, bytes ? bytes : 1, MADV_DONTNEED) == 0);
}

void pages_release(void *p, size_t bytes)
{
    if (p) CHECK(munmap(p, bytes ? bytes : 1) == 0);
}
