/* Kills the process before its n-th call that writes to files. Loaded with LD_PRELOAD; n is given through ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static atomic_long fatal;

void kill_at(long n) {
    fatal = n;
    calls = 0;
}

long calls_made(void) { return calls; }

static void count(void) {
    if (atomic_fetch_add(&calls, 1) + 1 == fatal) kill(getpid(), SIGKILL);
}

#define WATCH(type, name, parameters, arguments)                  \
    type name parameters {                                        \
        static type(*real) parameters;                            \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        count();                                                  \
        return real arguments;                                    \
    }

WATCH(ssize_t, write, (int f, const void *b, size_t n), (f, b, n))
WATCH(ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n))
WATCH(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), (f, b, n, o))
WATCH(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o))
WATCH(int, ftruncate, (int f, off_t n), (f, n))
WATCH(int, ftruncate64, (int f, off64_t n), (f, n))
WATCH(int, fsync, (int f), (f))
WATCH(int, fdatasync, (int f), (f))
WATCH(int, unlink, (const char *p), (p))
WATCH(int, rename, (const char *a, const char *b), (a, b))
