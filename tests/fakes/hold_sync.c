/* Preloaded into a daemon: a sync of the file with the name $HOLD_NAME waits as long as the file $HOLD_SYNC exists, as on
 * a disk that does not answer. $HOLD_SYNC.reached exists once a sync waits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_held(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    const char *name = strrchr(path, '/'), *held = getenv("HOLD_NAME");
    return name != NULL && held != NULL && strcmp(name + 1, held) == 0;
}

static void hold(int descriptor) {
    const char *path = getenv("HOLD_SYNC");
    if (path == NULL || !is_held(descriptor)) return;
    while (access(path, F_OK) == 0) {
        char reached[PATH_MAX];
        snprintf(reached, sizeof reached, "%s.reached", path);
        int marker = open(reached, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (marker >= 0) close(marker);
        usleep(1000);
    }
}

int fsync(int descriptor) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    hold(descriptor);
    return next(descriptor);
}

int fdatasync(int descriptor) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    hold(descriptor);
    return next(descriptor);
}
