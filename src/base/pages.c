#include "base/pages.h"

#include "base/mem.h"
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The beginning of a small file, without the heap, which may be full; "" if it cannot be read. */
static void read_small(char out[512], const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, 511);
    if (fd >= 0) close(fd);
    out[n < 0 ? 0 : n] = 0;
}

/* A number of bytes from a file that holds only it ("max" or absent: SIZE_MAX). */
static size_t number_in(const char *path)
{
    char text[512], *end;
    read_small(text, path);
    unsigned long long v = strtoull(text, &end, 10);
    return end != text ? (size_t)v : SIZE_MAX;
}

static size_t field_of(const char *text, const char *field)
{
    const char *at = strstr(text, field);
    return at ? (size_t)strtoull(at + strlen(field), NULL, 10) << 10 : SIZE_MAX;
}

void pages_left(size_t *available, size_t *total)
{
    char text[512];
    read_small(text, "/proc/meminfo"); /* both stand in its first lines */
    *available = field_of(text, "MemAvailable:");
    *total = field_of(text, "MemTotal:");
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
    void *p =
        mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

void pages_lend(void *p, size_t bytes)
{
    /* refused where there is no such thing: then the memory stays ours */
    (void)madvise(p, bytes ? bytes : 1, MADV_FREE);
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older ones refuse it */
#endif
bool pages_fill(void *p, size_t bytes)
{
    return madvise(p, bytes ? bytes : 1, MADV_POPULATE_WRITE) == 0;
}

void pages_drop(void *p, size_t bytes)
{
    CHECK(madvise(p, bytes ? bytes : 1, MADV_DONTNEED) == 0);
}

void pages_release(void *p, size_t bytes)
{
    if (p) CHECK(munmap(p, bytes ? bytes : 1) == 0);
}
