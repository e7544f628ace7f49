/*
 * faulty_io.h - the system calls that read a checkpoint, of which the n-th can be made to go wrong.
 *
 * Include it in one test program: its definitions take the place of libc's for everything linked in.
 * Calls are counted while `io.armed`; at the io.at-th, io.fault happens.  Any thread.
 */
#ifndef TEST_FAULTY_IO_H
#define TEST_FAULTY_IO_H

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

enum io_fault {
    IO_NONE,
    IO_ENOENT, /* the call fails so, if it may */
    IO_EIO,
    IO_SHORT, /* a read gives fewer bytes than were asked for: allowed, harmless */
    IO_END,   /* a read finds the end of the file */
    IO_FLIP,  /* a read gives one wrong bit */
    IO_HOOK   /* io.hook is called before the call */
};

static struct {
    _Atomic bool armed;
    _Atomic long calls;
    _Atomic bool hit; /* the fault has changed what a call gave */
    long at;
    enum io_fault fault;
    void (*hook)(void);
} io;

static void io_arm(enum io_fault fault, long at, void (*hook)(void))
{
    io.fault = fault;
    io.at = at;
    io.hook = hook;
    io.calls = 0;
    io.hit = false;
    io.armed = true;
}

static long io_disarm(void)
{
    io.armed = false;
    return io.calls;
}

static bool io_now(void)
{
    if (!io.armed || atomic_fetch_add(&io.calls, 1) + 1 != io.at) return false;
    if (io.fault != IO_HOOK) return true;
    io.hook();
    io.hit = true;
    return false;
}

/* Does a call fail that gives no bytes? */
static bool io_fails(void)
{
    if (!io_now() || (io.fault != IO_ENOENT && io.fault != IO_EIO)) return false;
    io.hit = true;
    errno = io.fault == IO_ENOENT ? ENOENT : EIO;
    return true;
}

#define IO_REAL(ret, name, ...)      \
    static ret (*real)(__VA_ARGS__); \
    if (!real) real = (ret(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

int open(const char *path, int flags, ...)
{
    IO_REAL(int, open, const char *, int, ...);
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list args;
        va_start(args, flags);
        mode = va_arg(args, mode_t);
        va_end(args);
    }
    return io_fails() ? -1 : real(path, flags, mode);
}

DIR *opendir(const char *path)
{
    IO_REAL(DIR *, opendir, const char *);
    return io_fails() ? NULL : real(path);
}

int stat(const char *path, struct stat *st)
{
    IO_REAL(int, stat, const char *, struct stat *);
    return io_fails() ? -1 : real(path, st);
}

int fstat(int fd, struct stat *st)
{
    IO_REAL(int, fstat, int, struct stat *);
    return io_fails() ? -1 : real(fd, st);
}

int fstatat(int fd, const char *path, struct stat *st, int flags)
{
    IO_REAL(int, fstatat, int, const char *, struct stat *, int);
    return io_fails() ? -1 : real(fd, path, st, flags);
}

/* What becomes of a read of n bytes: true: *out is what it gives. */
static bool io_read_fault(size_t *n, bool *flip, ssize_t *out)
{
    *flip = false;
    if (!io_now()) return false;
    io.hit = true;
    switch (io.fault) {
    case IO_SHORT:
        if (*n > 1) *n = *n / 2;
        return false;
    case IO_FLIP: *flip = true; return false;
    case IO_END: *out = 0; return true;
    default:
        errno = EIO;
        *out = -1;
        return true;
    }
}

ssize_t read(int fd, void *to, size_t n)
{
    IO_REAL(ssize_t, read, int, void *, size_t);
    bool flip;
    ssize_t got;
    if (io_read_fault(&n, &flip, &got)) return got;
    got = real(fd, to, n);
    if (flip && got > 0) ((unsigned char *)to)[got / 2] ^= 1;
    return got;
}

ssize_t pread(int fd, void *to, size_t n, off_t at)
{
    IO_REAL(ssize_t, pread, int, void *, size_t, off_t);
    bool flip;
    ssize_t got;
    if (io_read_fault(&n, &flip, &got)) return got;
    got = real(fd, to, n, at);
    if (flip && got > 0) ((unsigned char *)to)[got / 2] ^= 1;
    return got;
}

#endif
