/* LD_PRELOAD library: shifts the wall clock of a process by an offset that a test may change at any moment.
 *
 * $CLOCK_SHIFT names a file of two native signed 64-bit integers, offsets in nanoseconds: of the wall clock
 * (CLOCK_REALTIME, CLOCK_REALTIME_COARSE, time, gettimeofday), and of CLOCK_BOOTTIME. The process maps it at its first
 * reading of a clock, so a change applies at once, in all processes that use the file. The first alone is what happens
 * when an administrator or NTP steps the clock; both together, when the machine was suspended. CLOCK_MONOTONIC is never
 * shifted. The times of files are the kernel's: not shifted. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)

enum { WALL, BOOT, OFFSETS };
static const volatile int64_t none[OFFSETS] = {0, 0};
static const volatile int64_t *shift = NULL;

static int64_t shift_ns(int which) {
    if (shift == NULL) {
        const char *path = getenv("CLOCK_SHIFT");
        int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0)
            close(file);
        shift = mapped == MAP_FAILED ? none : mapped;
    }
    return shift[which];
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (!failed && (is_wall || clock == CLOCK_BOOTTIME)) {
        int64_t ns = at->tv_sec * SECOND + at->tv_nsec + shift_ns(is_wall ? WALL : BOOT);
        at->tv_sec = ns / SECOND;
        at->tv_nsec = ns % SECOND;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL)
        *at = now.tv_sec;
    return now.tv_sec;
}
